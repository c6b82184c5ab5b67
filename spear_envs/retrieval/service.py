"""The retrieval service: ``POST /retrieve``, ``GET /health`` and ``GET /metrics``, in one process or several.

A service may have several indexes. ``/NAME/retrieve`` and ``/NAME/health`` address one by name, the paths without a
name the default.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spear_envs.core.errors import SpearError, explain_invalid, suggest_name
from spear_envs.retrieval.batching import (
    Counts,
    LoopWorker,
    OverloadedError,
    QueryBatcher,
    RetrieverError,
    Spent,
    Worker,
    WorkerThread,
    make_cache,
)
from spear_envs.retrieval.limits import RequestLimits, ServiceSettings
from spear_envs.retrieval.retriever import (
    DEFAULT_TOPK,
    FaultKind,
    Passage,
    Retriever,
    RetrieverFault,
    RetrieverRefusal,
)
from spear_sandbox.web.answering import BodyRoom, add_error_pages, check_sender, write_json
from spear_sandbox.web.listening import bind_socket, work_aside
from spear_sandbox.web.serving import make_server, on_signals, stop_on_signals

logger = logging.getLogger(__name__)

ADVICE = "send fewer queries in one request"
"""Advice for a body that is too large."""
PART = 512
"""Queries of one request that wait at a time."""
RETRY_AFTER_S = 1
STATUS = {FaultKind.UNAVAILABLE: 503, FaultKind.TIMEOUT: 504, FaultKind.BAD_REPLY: 502}
LOADING = "the index is being loaded: try again in a moment."
DRAIN_S = 10
"""Time for requests under way after a signal to stop."""
RESTART_S, LONGEST_RESTART_S = 1.0, 30.0
"""Delay before a dead worker is restarted; doubled after each failure in a row."""
STOP_S = 15.0
"""Time for workers to stop, longer than their own drain."""

OpenIndexes = Callable[[], Mapping[str, Retriever]]
"""Opens the indexes by name, the default first. Picklable where several processes serve."""


# ---------------------------------------------------------------- requests and answers


class BadRequestError(Exception):
    """The request is not valid; the sender gets the message, and an empty row for each of ``queries``."""

    def __init__(self, message: str, queries: int = 0) -> None:
        super().__init__(message)
        self.queries = queries


class Body(BaseModel):
    """The body of ``POST /retrieve``. Other fields are ignored, as other servers of this contract do."""

    model_config = ConfigDict(strict=True)

    queries: list[Any] = []
    query: Any = None
    topk: int | None = Field(None, ge=1)
    return_scores: bool = False


@dataclass(frozen=True)
class Asked:
    """A request that was read."""

    queries: tuple[str, ...]
    """Its queries; empty for a blank one and for one that is refused, which have no hits."""
    topk: int
    return_scores: bool
    problem: str = ""
    """Why the first refused query is refused; empty if none is."""


def read_request(raw: bytes, limits: RequestLimits) -> Asked:
    """Read the body of ``POST /retrieve``.

    A query that is too long or no text is refused alone, since trainers send those of a whole batch together.

    Raises:
        BadRequestError: the body is not valid; the message names the field, its value and the limit.
    """
    separators = _count_separators(raw)
    if separators > limits.separators:  # most often within the queries, where they cost nothing
        separators = _count_separators(_STRING.sub(b"", raw))
    if separators > limits.separators:
        raise BadRequestError(
            f"the body has {separators} commas and opening brackets; at most {limits.separators} are allowed: {ADVICE}."
        )
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(data, dict):
        raise BadRequestError(f"the body must be a JSON object, not {json.dumps(data)[:40]}.")
    found = data.get("queries")
    rows = len(found) if isinstance(found, list) else int("query" in data)
    try:
        body = Body.model_validate(data)
    except ValidationError as error:
        raise BadRequestError(explain_invalid(error), rows) from None
    if len(body.model_fields_set & {"queries", "query"}) != 1:
        raise BadRequestError("give exactly one of 'queries' (a list of strings) and 'query' (a string).")
    topk = DEFAULT_TOPK if body.topk is None else body.topk
    if topk > limits.topk or rows * topk > limits.hits:
        raise BadRequestError(
            f"topk: {rows} queries with topk {topk} were asked; topk may be {limits.topk}, and queries times topk "
            f"{limits.hits}.",
            rows,
        )
    given = body.queries if "queries" in body.model_fields_set else [body.query]
    problems = [_find_problem(query, limits) for query in given]
    queries = tuple("" if problem or query.isspace() else query for query, problem in zip(given, problems, strict=True))
    first = next((f"queries.{i}: {problem}" for i, problem in enumerate(problems) if problem), "")
    return Asked(queries, topk, body.return_scores, first)


# One that is never closed extends to the end; else each escaped quote in it would begin another search to the end.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)


def _count_separators(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def _find_problem(query: object, limits: RequestLimits) -> str:
    """Say why a query is refused; empty if it is not."""
    if not isinstance(query, str):
        return f"a query must be a string, not {json.dumps(query)[:40]}."
    if len(query) > limits.characters:
        return f"the query has {len(query)} characters; at most {limits.characters} are allowed."
    try:
        query.encode()
    except UnicodeEncodeError as error:
        return f"the query has a lone surrogate at position {error.start}; only valid Unicode is allowed."
    return ""


def write_result(rows: Sequence[Sequence[Passage]], return_scores: bool) -> bytes:
    """Write the body of the answer; the documents are spliced in unchanged.

    Args:
        rows: passages of each query, in order.
        return_scores: whether an item is ``{"document": …, "score": …}`` or the document alone.
    """
    if return_scores:
        lists = (b",".join(b'{"document":%b,"score":%r}' % (hit.raw, hit.score) for hit in hits) for hits in rows)
    else:
        lists = (b",".join(hit.raw for hit in hits) for hits in rows)
    return b'{"result":[%b]}' % b",".join(b"[%b]" % items for items in lists)


# ---------------------------------------------------------------- the service


@dataclass(frozen=True)
class _Ready:
    """An open index."""

    retriever: Retriever
    batcher: QueryBatcher
    workers: tuple[Worker, ...]

    def describe(self) -> dict[str, Any]:
        return {
            "passages": self.retriever.passages,
            "fingerprint": self.retriever.fingerprint,
            "retriever": self.retriever.describe(),
            "counts": dict(self.retriever.counts()),
        }


class RetrievalService:
    """Retrievers behind the contract of Search-R1.

    Args:
        load: called once, on the thread that later searches the default.
    """

    def __init__(self, load: OpenIndexes, settings: ServiceSettings) -> None:
        self.settings = settings
        self._ready: dict[str, _Ready] = {}
        self.metrics = Counts()
        self.metrics.queue_length.set_function(self._count_waiting)
        self.metrics.registry.register(Spent(lambda: {name: one.retriever for name, one in self._ready.items()}))
        self._bodies = BodyRoom()
        self._load = load
        self._worker: WorkerThread | None = None

    def start(self) -> asyncio.Future[None]:
        """Start loading; the service refuses requests until the returned future is done.

        An error that keeps the service from starting becomes the future's exception.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()
        self._worker = WorkerThread()
        self._worker.submit(self._open, self._worker, loop, loaded)
        return loaded

    def close(self) -> None:
        """End the threads, each after its present batch, and close the retrievers."""
        for one in self._ready.values():
            for worker in one.workers:
                worker.close()
            one.retriever.close()
        if self._worker is not None:
            self._worker.close()

    def _open(self, worker: WorkerThread, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[None]) -> None:
        """Load the indexes, on the worker thread."""
        failure: Exception | None = None
        try:
            retrievers = self._load()
            share = self.settings.cache_bytes // len(retrievers)
            ready: dict[str, _Ready] = {}
            for name, retriever in retrievers.items():
                # The fingerprint of another service is asked for over the network: once, not at each GET /health.
                logger.debug("index %s has the fingerprint %s", name, retriever.fingerprint)
                workers: tuple[Worker, ...] = (LoopWorker(),)
                if not retriever.load.on_loop:
                    # OpenMP's threads belong to the thread that opened the default.
                    first = WorkerThread() if ready else worker
                    workers = (first, *(WorkerThread() for _ in range(retriever.load.calls - 1)))
                window = min(self.settings.batches.window, retriever.load.queries)
                limits = replace(self.settings.batches, window=window)
                batcher = QueryBatcher(retriever, workers, limits, make_cache(share), self.metrics)
                ready[name] = _Ready(retriever, batcher, workers)
            self._ready = ready
        except Exception as error:
            failure = error

        def settle() -> None:
            if not loaded.done():
                loaded.set_result(None) if failure is None else loaded.set_exception(failure)

        with contextlib.suppress(RuntimeError):  # the service was stopped meanwhile
            loop.call_soon_threadsafe(settle)

    def _find(self, request: Request) -> _Ready:
        """Return the index that the path names, or the default.

        Raises:
            OverloadedError: nothing is open yet.
            BadRequestError: the index does not exist.
        """
        if not self._ready:
            raise OverloadedError(LOADING)
        name = request.path_params.get("index", next(iter(self._ready)))
        if name not in self._ready:
            known = ", ".join(self._ready)
            raise BadRequestError(
                f"the index {name!r} does not exist: ask one of {known}.{suggest_name(name, self._ready)}"
            )
        return self._ready[name]

    def _count_waiting(self) -> int:
        return sum(one.batcher.pending for one in self._ready.values())

    def check_sender(self, request: Request) -> None:
        """Refuse a request from a page of another site, and one without the token if one is set."""
        check_sender(request, token=self.settings.token, local=self.settings.local)

    async def retrieve(self, request: Request) -> Response:
        """Answer ``POST /retrieve``."""
        start = time.perf_counter()
        status = 500
        try:
            response = await self._retrieve(request)
            status = response.status_code
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            self.metrics.answers.labels(status).inc()
            self.metrics.request_seconds.observe(time.perf_counter() - start)

    async def _retrieve(self, request: Request) -> Response:
        self.check_sender(request)
        try:
            body = await self._bodies.read(request, self.settings.requests.body_bytes, ADVICE)
            asked = await work_aside(len(body), partial(read_request, body, self.settings.requests))
            rows = await self._search(self._find(request), asked, request)
            bytes_about = 1000 * sum(map(len, rows))
            content = await work_aside(bytes_about, partial(write_result, rows, asked.return_scores))
            if asked.problem:  # with the hits of the other queries: Search-R1's client never looks at the status
                content = b'{"detail":%b,%b' % (json.dumps(asked.problem).encode(), content[1:])
            return Response(content, 422 if asked.problem else 200, media_type="application/json")
        except BadRequestError as error:
            return write_json(422, {"detail": str(error), "result": [[]] * error.queries})
        except RetrieverFault as error:
            raise HTTPException(STATUS[FaultKind(error.kind)], error.message) from None
        except (RetrieverError, SpearError) as error:
            status = 403 if isinstance(error, RetrieverRefusal) else getattr(error, "status", 500)
            headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
            raise HTTPException(status, str(error), headers=headers) from error

    async def _search(self, ready: _Ready, asked: Asked, request: Request) -> list[Sequence[Passage]]:
        """Search for the queries that are not empty, a part after the other, so that one request fills no queue."""
        rows: list[Sequence[Passage]] = []
        size = min(PART, self.settings.batches.pending)
        for start in range(0, len(asked.queries), size):
            part = asked.queries[start : start + size]
            found = iter(await ready.batcher.search(list(filter(None, part)), asked.topk, request.is_disconnected))
            rows += [next(found) if query else () for query in part]
        return rows

    def describe(self, name: str | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and content of ``GET /health`` for the default or a named index."""
        if not self._ready:
            return 503, {"status": "loading", "detail": LOADING}
        if name is not None and name not in self._ready:
            return 404, {"detail": f"the index {name!r} does not exist: ask one of {', '.join(self._ready)}."}
        queries, hits, joined = map(self.metrics.read, ("queries", "hits", "joined"))
        return 200, {
            "status": "ok",
            **self._ready[name or next(iter(self._ready))].describe(),
            "indexes": {other: one.describe() for other, one in self._ready.items()},
            "limits": {**asdict(self.settings.requests), **asdict(self.settings.batches)},
            "cache_bytes": self.settings.cache_bytes,
            "queries": queries,
            "hit_share": round(hits / max(queries, 1), 4),
            "joined_share": round(joined / max(queries, 1), 4),
            "waiting": self._count_waiting(),
        }

    def summarize(self) -> str:
        """Describe the service for people: ``"72 passages, bm25"``, with names if there are several indexes."""
        lines = []
        for name, one in self._ready.items():
            passages, kind = one.retriever.passages, one.retriever.describe()["kind"]
            text = kind if passages is None else f"{passages:,} passages, {kind}"
            lines.append(text if len(self._ready) == 1 else f"{name}: {text}")
        return "; ".join(lines)


def make_app(service: RetrievalService, on_loaded: Callable[[BaseException | None], None]) -> FastAPI:
    """Make the ASGI application of a service; its lifespan starts the loading.

    Args:
        service: not started yet.
        on_loaded: called with None when the service is ready, or with the error that keeps it from starting.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loaded = service.start()
        loaded.add_done_callback(lambda future: on_loaded(future.exception()))
        try:
            yield
        finally:
            service.close()

    app = FastAPI(title="Passages for search agents", lifespan=lifespan, openapi_url=None)
    for path in ("/retrieve", "/{index}/retrieve"):
        app.add_route(path, service.retrieve, methods=["POST"])
    add_error_pages(app, "POST /retrieve, GET /health or GET /metrics")

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/{index}/health", methods=["GET", "HEAD"])
    async def health(index: str | None = None) -> Response:
        status, content = service.describe(index)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
        return write_json(status, content, headers)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.check_sender(request)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app


def serve(service: RetrievalService, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Answer requests until SIGINT or SIGTERM, then finish those under way.

    Args:
        service: not started yet.
        listener: closed at the end.
        on_ready: called when the indexes are loaded.

    Raises:
        SpearError: a corpus or index cannot be opened, or they do not belong together.
    """
    failures: list[BaseException] = []

    def receive(failure: BaseException | None) -> None:
        if failure is None:
            # Loaded data need not be collected: a full collection would stop all callers for tens of milliseconds.
            gc.collect()
            gc.freeze()
            on_ready()
        else:
            failures.append(failure)
            server.should_exit = True

    server = make_server(make_app(service, receive), drain_s=DRAIN_S, lifespan="on", ws="none")
    with listener, stop_on_signals(server):
        server.run(sockets=[listener])
    if failures:
        raise failures[0]


# ---------------------------------------------------------------- several processes
#
# uvicorn's own ``workers=`` also restarts dead ones, but without the bounds on connections of our server and without a
# notice when the indexes are open or why they cannot be, and its workers outlive a killed parent.


class _Process:
    """A worker. It sends once whether it is ready, with its summary or its error; its pipe ends with it."""

    def __init__(self, *job: Any) -> None:
        self._job = job
        self._failures = 0
        self._restart_at = math.inf
        self.start()

    def start(self) -> None:
        context = get_context("spawn")
        self.reports, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(*self._job, theirs), name="retriever")
        self.process.start()
        theirs.close()
        self._restart_at = math.inf

    def receive(self) -> str:
        """Return the summary of a worker that has sent something or ended."""
        try:
            is_ready, said = self.reports.recv()
        except EOFError:
            self.process.join()
            is_ready, said = False, f"a worker ended with status {self.process.exitcode} before it could serve."
        if not is_ready:
            raise SpearError(said)
        return str(said)

    def look_after(self) -> None:
        """Start it again some time after it died, later after each failure in a row."""
        if time.monotonic() >= self._restart_at:
            self.start()
        elif self._restart_at == math.inf and self.reports.poll():
            with contextlib.suppress(SpearError):
                self.receive()
                self._failures = 0
                return
            self.process.join()
            delay = min(RESTART_S * 2**self._failures, LONGEST_RESTART_S)
            ended = self.process.pid, self.process.exitcode
            logger.warning("worker %d ended with status %s; another starts in %g s", *ended, delay)
            self._failures += 1
            self._restart_at = time.monotonic() + delay


def serve_workers(
    load: OpenIndexes, settings: ServiceSettings, host: str, port: int, *, number: int, on_ready: Callable[[str], None]
) -> None:
    """Serve with ``number`` processes until SIGINT or SIGTERM.

    The kernel distributes the connections. A worker that dies is restarted while the others answer. Each worker has its
    own queue, cache and metrics.

    Args:
        port: not 0 and free.
        number: at least 1.
        on_ready: called with a summary of the indexes when all workers answer.

    Raises:
        SpearError: a worker cannot open its indexes.
    """
    stop = threading.Event()
    workers = [_Process(load, settings, host, port) for _ in range(number)]
    with on_signals(stop.set):
        try:
            for worker in workers:
                while not stop.is_set() and not worker.reports.poll(0.2):
                    pass
                summary = "" if stop.is_set() else worker.receive()
            if not stop.is_set():
                on_ready(summary)
            while not stop.wait(0.2):
                for worker in workers:
                    worker.look_after()
        finally:
            for worker in workers:
                worker.reports.close()
                worker.process.terminate()
            end = time.monotonic() + STOP_S
            for worker in workers:
                worker.process.join(max(0.0, end - time.monotonic()))
                worker.process.kill()
                worker.process.join()


def _work(load: OpenIndexes, settings: ServiceSettings, host: str, port: int, text: Connection) -> None:
    """Serve, in a worker process, until a signal or until the parent ends."""
    service = RetrievalService(load, settings)

    def follow_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            text.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        listener = bind_socket(host, port, shared=True)
        threading.Thread(target=follow_parent, daemon=True).start()
        serve(service, listener, lambda: text.send((True, service.summarize())))
    except (SpearError, ModuleNotFoundError) as error:
        with contextlib.suppress(OSError):  # the parent stopped because another worker failed
            text.send((False, str(error)))
        sys.exit(1)
