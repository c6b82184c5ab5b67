"""The retrieval service: ``POST /retrieve``, ``GET /health`` and ``GET /metrics``.

A service may have several indexes. ``/NAME/retrieve`` and ``/NAME/health`` address one by name, the paths without a
name the default.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.retrieval.batching import (
    BatchLimits,
    CallerGoneError,
    DeadlineError,
    LoopWorker,
    MicroBatcher,
    OverloadedError,
    RetrieverError,
    Worker,
    WorkerThread,
)
from spear_envs.retrieval.cache import HitCache
from spear_envs.retrieval.metrics import collect_metrics
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault, RetrieverRefusal
from spear_envs.retrieval.tally import Tally
from spear_envs.retrieval.wire import BadRequestError, Query, RequestLimits, read_request, write_result
from spear_sandbox.web.answering import BodyRoom, add_error_pages, check_sender, write_json
from spear_sandbox.web.aside import work_aside
from spear_sandbox.web.metrics import CONTENT_TYPE, MetricsPage

if TYPE_CHECKING:
    from spear_envs.retrieval.backend import Backend, Found


logger = logging.getLogger(__name__)

ADVICE = "send fewer queries in one request"
"""For a body that is too large."""
PART = 512
"""Queries of one request that wait at a time."""
RETRY_AFTER_S = 1
STATUS = {FaultKind.UNAVAILABLE: 503, FaultKind.TIMEOUT: 504, FaultKind.BAD_REPLY: 502}
LOADING = "the index is being loaded: try again in a moment."


@dataclass(frozen=True)
class ServiceSettings:
    """Everything but the indexes."""

    requests: RequestLimits = field(default_factory=RequestLimits)
    batches: BatchLimits = field(default_factory=BatchLimits)
    cache_bytes: int = 64 << 20
    """For all indexes together."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that ``/retrieve`` and ``/metrics`` require; None requires none."""
    local: bool = False
    """Whether the service listens on the loopback interface and refuses requests for another host name."""


@dataclass(frozen=True)
class _Ready:
    """An open index."""

    backend: Backend
    batcher: MicroBatcher
    workers: tuple[Worker, ...]


class RetrievalService:
    """Indexes behind the contract of Search-R1.

    Args:
        load: opens the indexes by name, the default first; called once, on the thread that later searches the default.
    """

    def __init__(self, load: Callable[[], Mapping[str, Backend]], settings: ServiceSettings) -> None:
        self.settings = settings
        self._bodies = BodyRoom()
        self.tally = Tally()
        self.metrics = MetricsPage(
            lambda: collect_metrics(
                self.tally, self._count_waiting(), {name: one.backend.counts() for name, one in self._ready.items()}
            )
        )
        self._load = load
        self._ready: dict[str, _Ready] = {}
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
        """End the threads, each after its present batch, and close the backends."""
        for one in self._ready.values():
            for worker in one.workers:
                worker.close()
            one.backend.close()
        if self._worker is not None:
            self._worker.close()

    def _open(self, worker: WorkerThread, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[None]) -> None:
        """Load the indexes, on the worker thread."""
        try:
            backends = self._load()
            share = self.settings.cache_bytes // len(backends)
            ready: dict[str, _Ready] = {}
            for name, backend in backends.items():
                # The fingerprint of another service is asked for over the network: once, not at each GET /health.
                logger.debug("index %s has the fingerprint %s", name, backend.fingerprint)
                workers: tuple[Worker, ...] = (LoopWorker(),)
                if not backend.load.on_loop:
                    # OpenMP's threads belong to the thread that opened the default.
                    first = WorkerThread() if ready else worker
                    workers = (first, *(WorkerThread() for _ in range(backend.load.calls - 1)))
                limits = replace(self.settings.batches, window=min(self.settings.batches.window, backend.load.queries))
                batcher = MicroBatcher(backend, workers, limits, HitCache(share), self.tally)
                ready[name] = _Ready(backend, batcher, workers)
            self._ready = ready
        except Exception as error:
            _settle(loop, loaded, error)
        else:
            _settle(loop, loaded, None)

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
        try:
            response = await self._retrieve(request)
        except HTTPException as error:
            self._count(error.status_code, start)
            raise
        self._count(response.status_code, start)
        return response

    def _count(self, status: int, start: float) -> None:
        self.tally.answers[status] += 1
        self.tally.request_seconds.add(time.perf_counter() - start)

    async def _retrieve(self, request: Request) -> Response:
        self.check_sender(request)
        try:
            body = await self._bodies.read(request, self.settings.requests.body_bytes, ADVICE)
            asked = await work_aside(len(body), partial(read_request, body, self.settings.requests))
            ready = self._find(request)
            hits = await self._search(ready, asked, request)
            bytes_about = 1000 * sum(map(len, hits))
            content = await work_aside(
                bytes_about, partial(write_result, hits, ready.backend.read, asked.return_scores)
            )
            if asked.problem:  # with the hits of the other queries: Search-R1's client never looks at the status
                content = b'{"detail":%b,%b' % (json.dumps(asked.problem).encode(), content[1:])
            return Response(content, 422 if asked.problem else 200, media_type="application/json")
        except BadRequestError as error:
            return write_json(422, {"detail": str(error), "result": [[]] * error.queries})
        except OverloadedError as error:
            raise HTTPException(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)}) from None
        except DeadlineError as error:
            raise HTTPException(504, str(error)) from None
        except CallerGoneError:
            raise HTTPException(499, "the client has disconnected.") from None
        except RetrieverRefusal as error:
            raise HTTPException(403, str(error)) from None
        except RetrieverFault as error:
            raise HTTPException(STATUS[FaultKind(error.kind)], error.message) from None
        except (RetrieverError, SpearError) as error:
            raise HTTPException(500, str(error)) from error

    async def _search(self, ready: _Ready, asked: Query, request: Request) -> list[Sequence[Found]]:
        """Search for the queries that are not empty, a part after the other, so that one request fills no queue."""
        hits: list[Sequence[Found]] = []
        size = min(PART, self.settings.batches.pending)
        for start in range(0, len(asked.queries), size):
            part = asked.queries[start : start + size]
            found = iter(await ready.batcher.search(list(filter(None, part)), asked.topk, request.is_disconnected))
            hits += [next(found) if query else () for query in part]
        return hits

    def describe(self, name: str | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and content of ``GET /health`` for the default or a named index."""
        if not self._ready:
            return 503, {"status": "loading", "detail": LOADING}
        if name is not None and name not in self._ready:
            return 404, {"detail": f"the index {name!r} does not exist: ask one of {', '.join(self._ready)}."}
        tally = self.tally
        return 200, {
            "status": "ok",
            **_describe(self._ready[name or next(iter(self._ready))].backend),
            "indexes": {other: _describe(one.backend) for other, one in self._ready.items()},
            "limits": {**asdict(self.settings.requests), **asdict(self.settings.batches)},
            "cache_bytes": self.settings.cache_bytes,
            "queries": tally.queries,
            "hit_share": round(tally.hits / tally.queries, 4) if tally.queries else 0.0,
            "joined_share": round(tally.joined / tally.queries, 4) if tally.queries else 0.0,
            "waiting": self._count_waiting(),
        }

    def summarize(self) -> str:
        """Describe the service for people: ``"72 passages, bm25"``, with names if there are several indexes."""
        told = []
        for name, one in self._ready.items():
            passages, kind = one.backend.passages, one.backend.describe()["kind"]
            text = kind if passages is None else f"{passages:,} passages, {kind}"
            told.append(text if len(self._ready) == 1 else f"{name}: {text}")
        return "; ".join(told)


def _describe(backend: Backend) -> dict[str, Any]:
    return {
        "passages": backend.passages,
        "fingerprint": backend.fingerprint,
        "retriever": backend.describe(),
        "counts": dict(backend.counts()),
    }


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
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return app


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], error: Exception | None) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the service was stopped meanwhile
        logger.debug("loading ended after the end of the service")
