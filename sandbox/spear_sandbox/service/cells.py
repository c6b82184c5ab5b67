"""Sessions over HTTP, and SandboxFusion's ``/run_jupyter``, which runs cells in a private one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from spear_sandbox.errors import explain_invalid
from spear_sandbox.guest.interpreter import MAX_REPLY
from spear_sandbox.pool.admission import NoPlaceError, QueueFullError
from spear_sandbox.pool.cgroups import lacks_memory
from spear_sandbox.protocol import CellError, CellOutcome, CellStatus, FaultKind, Limits, SandboxFault
from spear_sandbox.service.wire import MAX_FILES, BadRequestError, check_name, dump_json, read_files
from spear_sandbox.sessions import MAX_FILE_BYTES, LocalSession
from spear_sandbox.web.answering import work_for, write_json, write_pieces
from spear_sandbox.web.listening import work_aside

_NAME = re.compile("[0-9a-f]{32}")
_SWEEP_S = 1.0


class SessionOpener(Protocol):
    """Opens sessions."""

    async def open_session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> LocalSession:
        """See :meth:`spear_sandbox.pool.local.LocalExecutor.open_session`."""
        ...


class TooManySessionsError(Exception):
    """The limit of open sessions is reached."""


class SessionTable:
    """Open sessions by name. Belongs to one event loop.

    Args:
        executor: opens them.
        most: how many may be open.
        idle_s: seconds after its last cell at which a session ends.
        spare: bytes of the container's memory that idle sessions leave to runs: while fewer are free, the session that
            has been idle longest ends. Else the kernel would kill, perhaps a run or the service.
    """

    def __init__(
        self,
        executor: SessionOpener,
        *,
        most: int,
        idle_s: float,
        spare: int = 0,
    ) -> None:
        self.most = most
        self.idle_s = idle_s
        self._executor = executor
        self._spare = spare
        self._sessions: dict[str, tuple[LocalSession, float]] = {}
        self._opening = 0
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(
        self, files: Mapping[str, bytes], limits: Limits, idle_s: float | None = None
    ) -> tuple[LocalSession, float]:
        """Open a session; return it and the idle seconds after which it ends, at most what this table allows.

        Raises TooManySessionsError at the limit, or as :meth:`spear_sandbox.pool.local.LocalExecutor.open_session`.
        """
        if len(self._sessions) + self._opening >= self.most:
            raise TooManySessionsError(f"all {self.most} sessions are open: close one, or wait until an idle one ends.")
        self._opening += 1
        try:
            session = await self._executor.open_session(files=files, limits=limits)
        finally:
            self._opening -= 1
        idle = min(idle_s or self.idle_s, self.idle_s)
        self._sessions[session.id] = session, idle
        session.on_end = lambda: self._sessions.pop(session.id, None) and None
        if not session.alive:
            self._sessions.pop(session.id)
        if self._sweeper is None:
            self._sweeper = asyncio.ensure_future(self._sweep())
        return session, idle

    def find(self, name: str) -> LocalSession:
        """Find the session of this name. Raises SandboxFault if it has ended, LookupError if none can have it."""
        if name in self._sessions:
            return self._sessions[name][0]
        if _NAME.fullmatch(name) is None:
            raise LookupError(name)
        text = "this session has ended, or the server was restarted: open another."
        raise SandboxFault(FaultKind.SESSION_ENDED, text)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min([_SWEEP_S, *(idle / 10 for _, idle in self._sessions.values())]))
            now = time.monotonic()
            pressed = bool(self._sessions) and lacks_memory(self._spare)
            for session, idle in sorted(self._sessions.values(), key=lambda one: one[0].used):
                if not session.busy and (pressed or now - session.used > idle):
                    await session.close()
                    pressed = lacks_memory(self._spare)


MOST_RETRY_S = 60
"""The longest ``Retry-After``."""

Given = TypeVar("Given", bound=BaseModel)
Ask = Callable[[Request], Awaitable[bytes]]


def _check_memory(megabytes: int) -> int:
    if megabytes < 1 and megabytes != -1:
        raise ValueError("give a whole number above 0, or -1 for the default")
    return megabytes


class OpenRequest(BaseModel):
    """The body of ``POST /sessions``."""

    files: dict[str, str | None] = {}
    memory_limit_MB: Annotated[int, AfterValidator(_check_memory)] = -1
    cell_timeout: float | None = Field(None, gt=0)
    idle_timeout: float | None = Field(None, gt=0)


class CellRequest(BaseModel):
    """The body of ``POST /sessions/{id}/run``."""

    code: str
    timeout: float | None = Field(None, gt=0)


class JupyterRequest(BaseModel):
    """The body of ``POST /run_jupyter``."""

    cells: list[str] = Field(max_length=1024)
    cell_timeout: float = Field(0, ge=0)
    total_timeout: float = Field(45, gt=0)
    kernel: Literal["python3"] = "python3"
    memory_limit_MB: Annotated[int, AfterValidator(_check_memory)] = -1
    files: dict[str, str | None] = {}
    fetch_files: list[str] = Field([], max_length=MAX_FILES)


class CellService:
    """Answers the paths of sessions over HTTP.

    A request may lower the limits of its session; longer timeouts of cells are cut to ``longest_s``.
    ``place`` is a context manager that waits for one of the places in which programs run.
    """

    def __init__(
        self,
        table: SessionTable,
        limits: Limits,
        *,
        longest_s: float,
        place: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self.table = table
        self._limits = replace(limits, wall_s=longest_s)
        self._place = place

    async def open(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /sessions``."""
        asked = await _read(OpenRequest, body)
        session, idle = await self._open(asked.files, asked.memory_limit_MB, asked.cell_timeout, asked.idle_timeout)
        return {"session_id": session.id, "idle_timeout": idle}

    async def run(self, name: str, body: bytes) -> Response:
        """Answer ``POST /sessions/{id}/run``."""
        asked = await _read(CellRequest, body)
        outcome = await _find(self, name).run(asked.code, timeout_s=asked.timeout, place=self._place)
        return await _write(describe_cell(outcome), _measure(outcome))

    async def play_notebook(self, body: bytes) -> Response:
        """Answer ``POST /run_jupyter``: all cells, also after one that failed, in a session that ends with it.

        It ends early when its time is up, or when all cells together have shown more than one cell may.
        """
        asked = await _read(JupyterRequest, body)
        for name in asked.fetch_files:
            check_name(name)
        # One place for all cells: its clock starts with it, so under load a notebook waits but does not time out.
        async with self._place():
            return await self._play(asked)

    async def _play(self, asked: JupyterRequest) -> Response:
        session, _ = await self._open(asked.files, asked.memory_limit_MB, None, None)
        started = time.monotonic()
        ends = started + min(asked.total_timeout, self._limits.wall_s)
        played: list[CellOutcome] = []
        files: dict[str, str] = {}
        left_out = 0
        room = MAX_REPLY
        try:
            for code in asked.cells:
                left = max(ends - time.monotonic(), 0.001)
                seconds = min(left, asked.cell_timeout or left)
                played.append(await session.run(code, timeout_s=seconds, place=contextlib.nullcontext))
                room -= _measure(played[-1])
                if room < 0:
                    played[-1] = replace(played[-1], display=(), stdout="", stderr="", error=_TOO_MUCH)
                if room < 0 or played[-1].status is not CellStatus.FINISHED:
                    break
            else:
                for name in asked.fetch_files:
                    try:
                        content = await session.read_file(name)
                    except ValueError:  # it is not there
                        continue
                    except SandboxFault as fault:  # what the program left behind has ended the session: its cells count
                        if fault.kind is not FaultKind.SESSION_ENDED:
                            raise
                        break
                    if len(content) > room:
                        left_out += 1
                        continue
                    room -= len(content)
                    files[name] = base64.b64encode(content).decode("ascii")
        finally:
            await session.close()
        notebook = _describe_notebook(played, files, left_out, time.monotonic() - started)
        return await _write(notebook, MAX_REPLY - room)

    async def _open(
        self, files: dict[str, str | None], memory_mb: int, cell_s: float | None, idle_s: float | None
    ) -> tuple[LocalSession, float]:
        limits = self._limits
        if memory_mb != -1:
            limits = replace(limits, memory_mb=min(memory_mb, limits.memory_mb))
        if cell_s is not None:
            limits = replace(limits, wall_s=min(cell_s, limits.wall_s))
        return await self.table.open(read_files(files), limits, idle_s)


_TOO_MUCH = CellError("OutputError", f"all cells together show more than {MAX_REPLY >> 20} MiB", ())


def _measure(outcome: CellOutcome) -> int:
    """Return the characters of everything that a cell showed, and some for each thing."""
    error = outcome.error
    texts = [outcome.stdout, outcome.stderr, *(text for forms in outcome.display for text in forms.values())]
    texts += [error.message, *error.traceback] if error is not None else []
    return sum(map(len, texts)) + 64 * (len(texts) + 2)


def describe_cell(outcome: CellOutcome) -> dict[str, Any]:
    """Return a cell's outcome for JSON."""
    error = outcome.error
    return {
        "status": outcome.status.value,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
        "display": list(outcome.display),
        "error": []
        if error is None
        else [{"ename": error.name, "evalue": error.message, "traceback": list(error.traceback)}],
        "execution_time": outcome.wall_s,
        "truncated": outcome.truncated,
        "reason": outcome.reason.value,
    }


def _describe_notebook(
    played: Sequence[CellOutcome], files: dict[str, str], left_out: int, seconds: float
) -> dict[str, Any]:
    last = played[-1].status if played else CellStatus.FINISHED
    # SandboxFusion's form has no result for a cell whose time was up or which ended the interpreter.
    if played and played[-1].error is _TOO_MUCH:
        last = CellStatus.ENDED
    status = "TimeLimitExceeded" if last is CellStatus.TIME_LIMIT else "Finished"
    code = {CellStatus.FINISHED: 0, CellStatus.TIME_LIMIT: None, CellStatus.ENDED: 1}[last]
    if last is CellStatus.ENDED and played[-1].reason.value == "timeout":
        status, code = "TimeLimitExceeded", None
    said = "" if last is CellStatus.FINISHED else f"cell {len(played)} ended it: {last.value} {played[-1].reason.value}"
    if left_out:
        said = f"{left_out} files left out: cells and files together have more than {MAX_REPLY >> 20} MiB"
    keep = ("stdout", "stderr", "display", "error")
    return {
        "status": "Success" if last is CellStatus.FINISHED else "Failed",
        "message": "",
        "driver": {"status": status, "execution_time": seconds, "return_code": code, "stdout": "", "stderr": said},
        "cells": [{name: cell[name] for name in keep} for cell in map(describe_cell, played)],
        "executor_pod_name": None,
        "files": files,
    }


async def _write(content: Any, characters: int) -> Response:
    return write_pieces(await work_aside(characters, lambda: dump_json(content)), "application/json")


async def _read(kind: type[Given], body: bytes) -> Given:
    try:
        return await work_aside(len(body), partial(kind.model_validate_json, body))
    except ValidationError as error:
        raise BadRequestError(explain_invalid(error)) from None


def add_routes(app: FastAPI, find_service: Callable[[], CellService], ask: Ask) -> None:
    """Answer the paths of sessions; ``ask`` lets a request in and reads its body."""

    @app.post("/sessions")
    async def open_session(request: Request) -> Response:
        body = await ask(request)
        return await _answer(find_service().open(body), 201)

    @app.post("/run_jupyter")
    async def run_jupyter(request: Request) -> Response:
        body = await ask(request)

        async def play() -> Any:
            try:
                return await find_service().play_notebook(body)
            except SandboxFault as fault:
                return {"status": "SandboxError", "message": str(fault), "driver": None, "cells": []}

        return await _answer(play(), request=request)

    @app.post("/sessions/{name}/run")
    async def run_cell(name: str, request: Request) -> Response:
        body = await ask(request)
        return await _answer(find_service().run(name, body), request=request)

    @app.post("/sessions/{name}/interrupt")
    async def interrupt(name: str, request: Request) -> Response:
        await ask(request)
        return await _answer(_find(find_service(), name).interrupt())

    @app.get("/sessions/{name}")
    async def describe(name: str, request: Request) -> Response:
        await ask(request)
        session = _find(find_service(), name)
        return write_json(200, {"running": session.running, "idle": time.monotonic() - session.used})

    @app.delete("/sessions/{name}")
    async def close(name: str, request: Request) -> Response:
        await ask(request)
        return await _answer(_find(find_service(), name).close())

    @app.get("/sessions/{name}/files")
    async def list_files(name: str, request: Request) -> Response:
        await ask(request)
        return await _answer(_find(find_service(), name).list_files())

    @app.get("/sessions/{name}/files/{path:any}")
    async def read_file(name: str, path: str, request: Request) -> Response:
        await ask(request)
        return await _answer(_find(find_service(), name).read_file(path))

    @app.put("/sessions/{name}/files/{path:any}")
    async def write_file(name: str, path: str, request: Request) -> Response:
        body = await ask(request)
        if len(body) > MAX_FILE_BYTES:
            raise HTTPException(413, f"a file of a session has at most {MAX_FILE_BYTES >> 20} MiB.")
        return await _answer(_find(find_service(), name).write_file(path, body))


def _find(service: CellService, name: str) -> LocalSession:
    try:
        return service.table.find(name)
    except LookupError:
        raise HTTPException(404, "unknown session: POST /sessions opens one.") from None
    except SandboxFault as fault:
        raise HTTPException(410, str(fault)) from None


def turn_away(error: NoPlaceError, what: str, busy_status: int = 503) -> HTTPException:
    """Return the error of a request that was turned away early (``busy_status``) or has waited (504)."""
    if isinstance(error, QueueFullError):
        after = {"Retry-After": str(max(1, min(MOST_RETRY_S, math.ceil(error.retry_s))))}
        return HTTPException(busy_status, f"{what}: {error}.", headers=after)
    return HTTPException(504, f"{what}: {error}.")


async def _answer(work: Awaitable[Any], status: int = 200, request: Request | None = None) -> Response:
    """Answer with the result; interrupt a cell when its client disconnects."""
    try:
        content = await (work if request is None else work_for(request, work))
    except NoPlaceError as error:
        raise turn_away(error, "no place for this cell") from None
    except TooManySessionsError as error:
        raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from None
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    except SandboxFault as fault:
        if fault.kind is FaultKind.SESSION_ENDED:
            raise HTTPException(410, str(fault)) from None
        raise HTTPException(502, str(fault)) from None
    if isinstance(content, bytes):
        return write_pieces([content], "application/octet-stream", status)
    if isinstance(content, Response):
        return content
    return write_json(status, content if content is not None else {})
