"""The HTTP service: SandboxFusion's ``/run_code`` and ``/run_jupyter``, sessions, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI, HTTPException, Request, Response

from spear_sandbox.installation import find_languages, run_language
from spear_sandbox.pool.admission import Admission, NoPlaceError, ServiceSettings
from spear_sandbox.pool.cgroups import most_of_a_run
from spear_sandbox.protocol import (
    Executor,
    FaultKind,
    Health,
    Isolation,
    KillReason,
    Outcome,
    RunStatus,
    SandboxFault,
)
from spear_sandbox.service.cells import CellService, SessionOpener, SessionTable, add_routes, turn_away
from spear_sandbox.service.wire import (
    ISOLATION_HEADER,
    LANGUAGE,
    SHOWN_CHARACTERS,
    BadRequestError,
    RunRequest,
    read_request,
    write_error,
    write_reply,
)
from spear_sandbox.web.answering import BodyRoom, add_error_pages, check_sender, work_for, write_json, write_pieces
from spear_sandbox.web.listening import work_aside
from spear_sandbox.web.metrics import CONTENT_TYPE, Families, Histogram, MetricsPage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


_count_seconds = partial(Histogram, (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0))


@dataclass
class Counts:
    """Counts since the start of the service."""

    running: int = 0
    runs: int = 0
    """Runs carried out, however they ended."""
    ended: Counter[str] = field(default_factory=Counter)
    """Runs by status: ``success``, ``failed``, ``time_limit``."""
    killed: Counter[str] = field(default_factory=Counter)
    """Runs that a limit ended, by its name."""
    faults: int = 0
    """Runs that the sandbox failed to carry out."""
    gateway_timeouts: int = 0
    """Requests that waited for a place in vain."""
    gone: int = 0
    """Requests whose sender left before the answer; their runs were dropped or killed."""
    answers: Counter[int] = field(default_factory=Counter)
    """Answers of ``/run_code`` by HTTP status."""
    cpu_seconds: float = 0.0
    """CPU time of all runs."""
    queue_seconds: Histogram = field(default_factory=_count_seconds)
    run_seconds: Histogram = field(default_factory=_count_seconds)
    """Wall time of runs, without their wait."""
    request_seconds: Histogram = field(default_factory=_count_seconds)
    """Seconds of requests to ``/run_code``, whatever the answer."""


def collect_metrics(counts: Counts, admission: Admission, health: Health) -> Iterator[Metric]:
    """Yield all current metrics of the service."""
    make = Families("spear_sandbox_")
    yield make.count_by("runs", "Runs that were carried out, by how they ended.", "ended", counts.ended)
    yield make.count_by("killed", "Runs that a limit ended, by the limit.", "reason", counts.killed)
    yield make.count_by("answers", "Answers of /run_code by HTTP status.", "status", counts.answers)
    yield make.count("faults", "Runs that failed through the sandbox itself.", counts.faults)
    yield make.count("gateway_timeouts", "Requests for which no place became free in time.", counts.gateway_timeouts)
    yield make.count("gone", "Requests whose sender did not wait for the answer.", counts.gone)
    yield make.count("run_cpu_seconds", "CPU time of all runs.", counts.cpu_seconds)
    yield make.count("zygote_restarts", "Zygotes started to replace dead ones.", health.restarts)
    yield make.gauge("zygotes", "Zygotes that live.", health.zygotes)
    yield make.gauge("running", "Runs under way.", counts.running)
    yield make.gauge("queued", "Requests that wait for a place.", admission.queued)
    yield make.gauge("max_running", "Places.", admission.places)
    yield make.gauge("healthy", "1 if runs can be started.", float(health.ok))
    level = {"level": health.level.value, "weak": str(health.level.weak).lower()}
    yield make.label("isolation", "The level in use.", level)
    yield make.histogram("queue_seconds", "Seconds until a run has its place.", counts.queue_seconds)
    yield make.histogram("run_seconds", "Wall time of runs, without their wait.", counts.run_seconds)
    yield make.histogram("request_seconds", "Seconds until a request is answered.", counts.request_seconds)


logger = logging.getLogger(__name__)

ADVICE = "send fewer or smaller files, or raise --max-body-mb of the server"
"""Advice for a body that is too large."""
COMPILE_SLACK_S = 5.0
"""How much longer than its ``compile_timeout`` a request may wait: half of what clients grant on top."""


class ServedExecutor(Executor, SessionOpener, Protocol):
    """Runs the service's code."""

    def health(self) -> Health:
        """Return the state of the executor, without waiting."""


class RunService:
    """Serves an executor, started and closed by the caller, through SandboxFusion's API. Belongs to one event loop."""

    def __init__(self, executor: ServedExecutor, settings: ServiceSettings) -> None:
        self.settings = settings
        self._bodies = BodyRoom()
        self.counts = Counts()
        self.admission = Admission(settings.max_running, settings.queue_length)
        self.metrics = MetricsPage(lambda: collect_metrics(self.counts, self.admission, executor.health()))
        self._executor = executor
        self.languages = find_languages()
        self.cells = CellService(
            SessionTable(
                executor,
                most=settings.max_sessions,
                idle_s=settings.session_idle_s,
                spare=most_of_a_run(settings.limits) << 20,
            ),
            settings.limits,
            longest_s=settings.max_run_s,
            place=lambda: self._hold(settings.queue_wait_s),
        )

    @contextlib.asynccontextmanager
    async def _hold(self, seconds: float) -> AsyncIterator[None]:
        """Hold a place, for which this waits so long."""
        await self.admission.enter(seconds)
        self.counts.running += 1
        try:
            yield
        finally:
            self.counts.running -= 1
            self.admission.leave()

    async def read(self, request: Request) -> bytes:
        """Let a request in and read its body. Raises HTTPException if it is refused, or the body is too large."""
        self.check_sender(request)
        return await self._bodies.read(request, self.settings.body_bytes, ADVICE)

    def check_sender(self, request: Request) -> None:
        """Refuse requests from pages of other sites, and those without the token, if there is one."""
        settings = self.settings
        check_sender(request, token=settings.token, local=settings.local, hosts=settings.hosts)

    async def run_code(self, request: Request) -> Response:
        """Answer ``POST /run_code``."""
        start = time.perf_counter()
        status = 500
        try:
            response = await self._answer(request)
            status = response.status_code
        except HTTPException as error:
            status = error.status_code
            self.counts.gone += status == 499
            raise
        finally:
            self.counts.answers[status] += 1
            self.counts.request_seconds.add(time.perf_counter() - start)
        return response

    async def _answer(self, request: Request) -> Response:
        body = await self.read(request)
        try:
            asked = await work_aside(len(body), partial(read_request, body))
        except BadRequestError as error:
            raise HTTPException(422, str(error)) from None
        del body
        if asked.language != LANGUAGE and asked.language not in self.languages:
            served = ", ".join(sorted({LANGUAGE, *self.languages}))
            text = f"language {asked.language[:SHOWN_CHARACTERS]!a} is not served here: only {served}."
            return self._say(write_error(text, self._level()))
        # The place is given back only when the run is dead.
        return self._say(await work_for(request, self._work(asked)))

    async def _work(self, asked: RunRequest) -> Sequence[bytes]:
        """Wait for a place, run, write the reply."""
        start = time.perf_counter()
        async with contextlib.AsyncExitStack() as held:
            seconds = min(self.settings.queue_wait_s, asked.compile_timeout + COMPILE_SLACK_S)
            try:
                await held.enter_async_context(self._hold(seconds))
            except NoPlaceError as error:
                self.counts.gateway_timeouts += 1
                taken = f"all {self.settings.max_running} places are taken"
                raise turn_away(error, taken, self.settings.busy_status) from None
            waited = time.perf_counter() - start
            self.counts.queue_seconds.add(waited)
            try:
                compiled, outcome = await self._run(asked)
            except SandboxFault as fault:
                self.counts.faults += 1
                return write_error(str(fault), self._level(), waited, fault.kind)
        last = outcome or compiled
        assert last is not None
        counts = self.counts
        counts.runs += 1
        counts.cpu_seconds += last.cpu_s
        counts.run_seconds.add(last.wall_s)
        late = last.status is RunStatus.TIME_LIMIT
        counts.ended["time_limit" if late else "success" if last.return_code == 0 else "failed"] += 1
        if last.reason is not KillReason.NONE:
            counts.killed[last.reason.value] += 1
        return await work_aside(
            sum(map(len, last.files.values())), lambda: write_reply(outcome, waited + last.queue_s, compiled)
        )

    async def _run(self, asked: RunRequest) -> tuple[Outcome | None, Outcome | None]:
        limits = self.settings.limits
        memory = limits.memory_mb if asked.memory_mb is None else min(asked.memory_mb, limits.memory_mb)
        limits = replace(limits, wall_s=min(asked.run_timeout, self.settings.max_run_s), memory_mb=memory)
        try:
            return await run_language(self._executor, self.languages.get(asked.language), asked, limits)
        except (SandboxFault, asyncio.CancelledError):
            raise
        except ValueError as error:  # refused names of files
            raise HTTPException(422, str(error)) from None
        except Exception as error:
            logger.exception("a run failed in the sandbox itself")
            raise SandboxFault(FaultKind.UNAVAILABLE, f"the sandbox failed: {type(error).__name__}.") from error

    def _level(self) -> Isolation:
        return self._executor.health().level

    def _say(self, content: Sequence[bytes]) -> Response:
        return write_pieces(content, "application/json", headers={ISOLATION_HEADER: self._level().value})

    def describe(self) -> tuple[int, dict[str, Any]]:
        """Return the status and content of ``GET /health``."""
        health = self._executor.health()
        isolation = {"level": health.level.value, "weak": health.level.weak, "features": dict(health.features)}
        return 200 if health.ok else 503, {
            "status": "ok" if health.ok else "degraded",
            "isolation": isolation,
            "zygotes": health.zygotes,
            "restarts": health.restarts,
            "running": self.counts.running,
            "queued": self.admission.queued,
            "max_running": self.settings.max_running,
            "languages": sorted({LANGUAGE, *self.languages}),
            "sessions": len(self.cells.table),
            "max_sessions": self.settings.max_sessions,
            "runs": self.counts.runs,
            "killed": dict(sorted(self.counts.killed.items())),
            "gateway_timeouts": self.counts.gateway_timeouts,
        }


def make_app(find_service: Callable[[], RunService]) -> FastAPI:
    """Return the ASGI application of a service, which is found for each request, so that it can be made later."""
    app = FastAPI(title="Sandbox for model-written Python", openapi_url=None)
    add_error_pages(app, "POST /run_code, /run_jupyter or /sessions, GET /v1/ping, /health or /metrics")

    async def read(request: Request) -> bytes:
        return await find_service().read(request)

    add_routes(app, lambda: find_service().cells, read)

    async def run_code(request: Request) -> Response:
        return await find_service().run_code(request)

    # Starlette's route: FastAPI's would look for dependencies and forms in each request.
    app.add_route("/run_code", run_code, methods=["POST"])

    @app.get("/v1/ping")
    async def ping() -> Response:
        return write_json(200, "pong")

    @app.get("/health")
    async def health() -> Response:
        status, content = find_service().describe()
        return write_json(status, content, {ISOLATION_HEADER: content["isolation"]["level"]})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service = find_service()
        service.check_sender(request)
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return app
