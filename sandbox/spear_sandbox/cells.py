"""Sessions over HTTP, and SandboxFusion's ``/run_jupyter``, which runs cells in a private one."""

from __future__ import annotations

import base64
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field, ValidationError

from spear_sandbox.admission import NoPlaceError, QueueFullError
from spear_sandbox.protocol import CellOutcome, CellStatus, FaultKind, Limits, SandboxFault
from spear_sandbox.sessions import MAX_FILE_BYTES, LocalSession
from spear_sandbox.table import SessionTable, TooManySessionsError
from spear_sandbox.web.answering import work_for, write_json
from spear_sandbox.wire import BadRequestError, check_name, read_files

MOST_RETRY_S = 60
"""The longest ``Retry-After``."""

Given = TypeVar("Given", bound=BaseModel)
Ask = Callable[[Request], Awaitable[bytes]]


class OpenRequest(BaseModel):
    """The body of ``POST /sessions``."""

    files: dict[str, str | None] = {}
    memory_limit_MB: int = Field(-1, ge=-1)
    cell_timeout: float | None = Field(None, gt=0)
    idle_timeout: float | None = Field(None, gt=0)


class CellRequest(BaseModel):
    """The body of ``POST /sessions/{id}/run``."""

    code: str
    timeout: float | None = Field(None, gt=0)


class JupyterRequest(BaseModel):
    """The body of ``POST /run_jupyter``."""

    cells: list[str]
    cell_timeout: float = Field(0, ge=0)
    total_timeout: float = Field(45, gt=0)
    kernel: Literal["python3"] = "python3"
    memory_limit_MB: int = Field(-1, ge=-1)
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class CellService:
    """Sessions behind HTTP.

    A request may lower the limits of its session; longer timeouts of cells are cut to ``longest_s``. ``enter`` and
    ``leave`` take and give back a place for a cell.
    """

    def __init__(
        self,
        table: SessionTable,
        limits: Limits,
        *,
        longest_s: float,
        enter: Callable[[], Awaitable[None]],
        leave: Callable[[], None],
    ) -> None:
        self.table = table
        self._limits = replace(limits, wall_s=longest_s)
        self._enter = enter
        self._leave = leave

    async def open(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /sessions``."""
        asked = _read(OpenRequest, body)
        session, idle = await self._open(asked.files, asked.memory_limit_MB, asked.cell_timeout, asked.idle_timeout)
        return {"session_id": session.id, "idle_timeout": idle}

    async def run(self, name: str, body: bytes) -> dict[str, Any]:
        """Answer ``POST /sessions/{id}/run``."""
        asked = _read(CellRequest, body)
        return describe_cell(await self._play(_find(self, name), asked.code, asked.timeout))

    async def play_notebook(self, body: bytes) -> dict[str, Any]:
        """Answer ``POST /run_jupyter``: all cells, also after one that failed, in a session that ends with it."""
        asked = _read(JupyterRequest, body)
        for name in asked.fetch_files:
            check_name(name)
        session, _ = await self._open(asked.files, asked.memory_limit_MB, None, None)
        started = time.monotonic()
        played: list[CellOutcome] = []
        files: dict[str, str] = {}
        try:
            for code in asked.cells:
                left = asked.total_timeout - (time.monotonic() - started)
                seconds = min(left, asked.cell_timeout or left)
                played.append(await self._play(session, code, max(seconds, 0.001)))
                if played[-1].status is not CellStatus.FINISHED:
                    break
            else:
                for name in asked.fetch_files:
                    with contextlib.suppress(ValueError):  # it is not there
                        files[name] = base64.b64encode(await session.read_file(name)).decode("ascii")
        finally:
            await session.close()
        return _describe_notebook(played, files, time.monotonic() - started)

    async def _open(
        self, files: dict[str, str | None], memory_mb: int, cell_s: float | None, idle_s: float | None
    ) -> tuple[LocalSession, float]:
        limits = self._limits
        if memory_mb > 0:
            limits = replace(limits, memory_mb=min(memory_mb, limits.memory_mb))
        if cell_s is not None:
            limits = replace(limits, wall_s=min(cell_s, limits.wall_s))
        return await self.table.open(read_files(files), limits, idle_s)

    async def _play(self, session: LocalSession, code: str, seconds: float | None) -> CellOutcome:
        await self._enter()
        try:
            return await session.run(code, timeout_s=seconds)
        finally:
            self._leave()


def describe_cell(outcome: CellOutcome) -> dict[str, Any]:
    """A cell's outcome for JSON."""
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


def _describe_notebook(played: Sequence[CellOutcome], files: dict[str, str], seconds: float) -> dict[str, Any]:
    last = played[-1].status if played else CellStatus.FINISHED
    # SandboxFusion's form has no result for a cell whose time was up or which ended the interpreter.
    status = "TimeLimitExceeded" if last is CellStatus.TIME_LIMIT else "Finished"
    code = {CellStatus.FINISHED: 0, CellStatus.TIME_LIMIT: None, CellStatus.ENDED: 1}[last]
    if last is CellStatus.ENDED and played[-1].reason.value == "timeout":
        status, code = "TimeLimitExceeded", None
    said = "" if last is CellStatus.FINISHED else f"cell {len(played)} ended it: {last.value} {played[-1].reason.value}"
    keep = ("stdout", "stderr", "display", "error")
    return {
        "status": "Success" if last is CellStatus.FINISHED else "Failed",
        "message": "",
        "driver": {"status": status, "execution_time": seconds, "return_code": code, "stdout": "", "stderr": said},
        "cells": [{name: cell[name] for name in keep} for cell in map(describe_cell, played)],
        "executor_pod_name": None,
        "files": files,
    }


def _read(kind: type[Given], body: bytes) -> Given:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequestError(f"{place}: {first['msg']}.") from None


def add_routes(app: FastAPI, find_service: Callable[[], CellService], ask: Ask) -> None:
    """Answer the paths of sessions; ``ask`` lets a request in and reads its body."""

    @app.post("/sessions")
    async def open_session(request: Request) -> Response:
        body = await ask(request)
        return await _answer(find_service().open(body), 201)

    @app.post("/run_jupyter")
    async def run_jupyter(request: Request) -> Response:
        body = await ask(request)
        try:
            return await _answer(find_service().play_notebook(body))
        except SandboxFault as fault:
            return write_json(200, {"status": "SandboxError", "message": str(fault), "driver": None, "cells": []})

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

    @app.get("/sessions/{name}/files/{path:path}")
    async def read_file(name: str, path: str, request: Request) -> Response:
        await ask(request)
        return await _answer(_find(find_service(), name).read_file(path))

    @app.put("/sessions/{name}/files/{path:path}")
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
    """``busy_status`` for a request that was turned away early, 504 for one that has waited."""
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
        return Response(content, status, media_type="application/octet-stream")
    return write_json(status, content if content is not None else {})
