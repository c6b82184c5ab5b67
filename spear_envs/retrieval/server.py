"""The retrieval service: ``POST /retrieve``, ``GET /health`` and ``GET /metrics``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.batching import (
    BatchLimits,
    CallerGoneError,
    DeadlineError,
    MicroBatcher,
    OverloadedError,
    RetrieverError,
    WorkerThread,
)
from spear_envs.retrieval.cache import HitCache
from spear_envs.retrieval.metrics import collect_metrics
from spear_envs.retrieval.searcher import check_match
from spear_envs.retrieval.tally import Tally
from spear_envs.retrieval.wire import BadRequestError, RequestLimits, read_request, write_result
from spear_sandbox.web.answering import BodyRoom, add_error_pages, check_sender, write_json
from spear_sandbox.web.metrics import CONTENT_TYPE, MetricsPage

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.retriever import Retriever

__all__ = ["RetrievalService", "ServiceSettings", "make_app"]

logger = logging.getLogger(__name__)

ADVICE = "send fewer queries in one request"
"""For a body that is too large."""
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class ServiceSettings:
    """Everything but the corpus and the retriever."""

    requests: RequestLimits = field(default_factory=RequestLimits)
    batches: BatchLimits = field(default_factory=BatchLimits)
    cache_bytes: int = 64 << 20
    token: str | None = field(default=None, repr=False)
    """What ``/retrieve`` and ``/metrics`` want to see as a bearer token; None asks for none."""
    local: bool = False
    """Listens on the loopback interface: requests under the name of another host are refused."""


@dataclass(frozen=True)
class _Ready:
    corpus: Corpus
    retriever: Retriever
    batcher: MicroBatcher


class RetrievalService:
    """One corpus and one retriever behind the contract of Search-R1.

    Args:
        load: opens them; called once, on the thread that searches later.
        settings: limits, cache, token.
    """

    def __init__(self, load: Callable[[], tuple[Corpus, Retriever]], settings: ServiceSettings) -> None:
        self.settings = settings
        self._bodies = BodyRoom()
        self.tally = Tally()
        self.metrics = MetricsPage(
            lambda: collect_metrics(self.tally, self._ready.batcher.pending if self._ready else 0)
        )
        self._load = load
        self._ready: _Ready | None = None
        self._worker: WorkerThread | None = None

    def start(self) -> asyncio.Future[None]:
        """Begin to load; requests are turned away until the future that is returned is done.

        What keeps the service from starting is the future's exception.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()
        self._worker = WorkerThread()
        self._worker.submit(self._open, self._worker, loop, loaded)
        return loaded

    def close(self) -> None:
        """Let the thread end."""
        if self._worker is not None:
            self._worker.close()

    def _open(self, worker: WorkerThread, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[None]) -> None:
        """Load, on the worker thread."""
        try:
            corpus, retriever = self._load()
            check_match(corpus, retriever)
            cache = HitCache(self.settings.cache_bytes)
            batcher = MicroBatcher(retriever, worker, self.settings.batches, cache, self.tally)
            self._ready = _Ready(corpus, retriever, batcher)
        except Exception as error:
            _settle(loop, loaded, error)
        else:
            _settle(loop, loaded, None)

    def check_sender(self, request: Request) -> None:
        """Refuse a request of a page of another site, and one without the token, if there is one."""
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
            asked = read_request(body, self.settings.requests)
            if (ready := self._ready) is None:
                raise OverloadedError("the index is being loaded: try again in a moment.")
            rows = await ready.batcher.search(asked.queries, asked.topk, request.is_disconnected)
            content = write_result(rows, ready.corpus.raw, asked.return_scores)
        except BadRequestError as error:
            raise HTTPException(422, str(error)) from None
        except OverloadedError as error:
            raise HTTPException(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)}) from None
        except DeadlineError as error:
            raise HTTPException(504, str(error)) from None
        except CallerGoneError:
            raise HTTPException(499, "the one who asked is gone.") from None
        except (RetrieverError, SpearError) as error:
            raise HTTPException(500, str(error)) from error
        return Response(content, media_type="application/json")

    def describe(self) -> tuple[int, dict[str, Any]]:
        """Status and content of ``GET /health``."""
        if self._ready is None:
            return 503, {"status": "loading", "detail": "the index is being loaded: try again in a moment."}
        corpus, retriever = self._ready.corpus, self._ready.retriever
        tally = self.tally
        return 200, {
            "status": "ok",
            "passages": len(corpus),
            "fingerprint": retriever.fingerprint,
            "corpus": corpus.fingerprint,
            "retriever": retriever.describe(),
            "limits": {**asdict(self.settings.requests), **asdict(self.settings.batches)},
            "cache_bytes": self.settings.cache_bytes,
            "queries": tally.queries,
            "hit_share": round(tally.hits / tally.queries, 4) if tally.queries else 0.0,
            "joined_share": round(tally.joined / tally.queries, 4) if tally.queries else 0.0,
            "waiting": self._ready.batcher.pending,
        }


def make_app(service: RetrievalService, on_loaded: Callable[[BaseException | None], None]) -> FastAPI:
    """The ASGI application of a service; its lifespan begins the loading.

    Args:
        service: not started yet.
        on_loaded: hears that the service is ready, or what keeps it from starting.
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
    app.add_route("/retrieve", service.retrieve, methods=["POST"])
    add_error_pages(app, "POST /retrieve, GET /health or GET /metrics")

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        status, content = service.describe()
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
