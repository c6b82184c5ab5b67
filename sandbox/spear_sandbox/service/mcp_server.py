"""The sandbox as tools of the Model Context Protocol, by the official package ``mcp``."""

from __future__ import annotations

import base64
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, Literal, Protocol

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from spear_sandbox.protocol import (
    CellOutcome,
    CellStatus,
    Executor,
    FaultKind,
    Limits,
    RunStatus,
    SandboxFault,
    Session,
)
from spear_sandbox.service.wire import read_base64

PICTURES = ("image/png", "image/jpeg")
SHOWN = 64 << 10
"""Characters of a program's stream, or of all that a cell shows, in a tool's result; the middle of more is left out."""
SHOWN_PICTURES = 8 << 20
"""Characters of all pictures of a cell, in base64."""
IDLE_S = 600.0
"""A session that has not been used for so long gives way to a new one."""

Code = Annotated[str, Field(description="Python source.")]
Name = Annotated[str, Field(description="What open_session gave.")]
Path = Annotated[str, Field(description="Relative name of a file in the working folder.", min_length=1)]
Encoding = Annotated[Literal["utf-8", "base64"], Field(description="How the content is written.")]


class SessionExecutor(Executor, Protocol):
    """Runs programs and opens sessions: a private pool, or a client of a service."""

    async def open_session(self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None) -> Session:
        """See :meth:`spear_sandbox.pool.local.LocalExecutor.open_session`."""
        ...


class RunResult(BaseModel):
    """What a program did."""

    status: str
    """``Finished``, or ``TimeLimitExceeded``."""
    exit_code: int | None
    stdout: str
    stderr: str


LIMITS = Limits(wall_s=300.0)
"""Of a program and of a cell, unless others are given."""


class FileList(BaseModel):
    """Files of a session and their bytes."""

    files: dict[str, int]


def make_mcp_server(executor: SessionExecutor, *, most_sessions: int = 16, limits: Limits = LIMITS) -> MCPServer[Any]:
    """Make the server; any number of clients may call it at once. The executor is not closed.

    At ``most_sessions`` a new session takes the place of one that has been idle for ten minutes, or is refused, so
    clients cannot close each other's. ``limits`` are those of a program, and of a cell.
    """
    server: MCPServer[Any] = MCPServer("spear-sandbox", version=version("spear-sandbox"), log_level="WARNING")
    tools = _Tools(executor, most_sessions, limits)
    apart = ToolAnnotations(destructive_hint=False, open_world_hint=False)
    for tool in (
        tools.run_code,
        tools.open_session,
        tools.run_cell,
        tools.write_file,
        tools.read_file,
        tools.list_files,
        tools.close_session,
    ):
        server.tool(annotations=apart)(tool)
    return server


class _Tools:
    """The tools; models see the docstrings."""

    def __init__(self, executor: SessionExecutor, most_sessions: int, limits: Limits) -> None:
        self._executor = executor
        self._most = most_sessions
        self._limits = limits
        self._sessions: dict[str, Session] = {}
        self._used: dict[str, float] = {}
        self._calls: Counter[str] = Counter()
        """Calls under way by session, which is not idle as long as there are any."""
        self._opening = 0

    async def run_code(
        self,
        code: Code,
        stdin: Annotated[str, Field(description="What the program can read.")] = "",
        timeout: Annotated[float, Field(description="Seconds.", gt=0)] = 30.0,
    ) -> RunResult:
        """Run a Python program in a fresh sandbox without network. Print what you want to see; nothing is kept."""
        limits = replace(self._limits, wall_s=min(timeout, self._limits.wall_s))
        with _as_tool_errors():
            outcome = await self._executor.run(code, stdin=stdin, limits=limits)
        status = RunStatus(outcome.status).value
        return RunResult(
            status=status, exit_code=outcome.return_code, stdout=_cut(outcome.stdout), stderr=_cut(outcome.stderr)
        )

    async def open_session(self) -> str:
        """Open a Python session that keeps variables and files from cell to cell. Returns its id."""
        idle: Session | None = None
        with _as_tool_errors():
            if len(self._sessions) + self._opening >= self._most:
                unused = [name for name in self._sessions if not self._calls[name]]
                oldest = min(unused, key=self._used.__getitem__, default=None)
                if oldest is None or time.monotonic() - self._used[oldest] < IDLE_S:
                    raise ToolError(f"all {self._most} sessions are in use: close one.")
                idle = self._forget(oldest)
            self._opening += 1  # before the wait, in which another call may open one
            try:
                if idle is not None:
                    await idle.close()
                session = await self._executor.open_session(limits=self._limits)
            finally:
                self._opening -= 1
        self._sessions[session.id] = session
        self._used[session.id] = time.monotonic()
        return session.id

    async def run_cell(
        self, session_id: Name, code: Code, timeout: Annotated[float, Field(description="Seconds.", gt=0)] = 60.0
    ) -> list[TextContent | ImageContent]:
        """Run a cell in a session, as a notebook does: the value of a last expression and plots are shown."""
        with self._use(session_id) as session:
            outcome = await session.run(code, timeout_s=timeout)
        if outcome.status is CellStatus.ENDED and session_id in self._sessions:
            self._forget(session_id)
        return _show(outcome)

    async def write_file(
        self,
        session_id: Name,
        path: Path,
        content: Annotated[str, Field(description="What to write.")],
        encoding: Encoding = "utf-8",
    ) -> None:
        """Write a file into a session's working folder."""
        with self._use(session_id) as session:
            data = content.encode() if encoding == "utf-8" else read_base64(content)
            await session.write_file(path, data)

    async def read_file(self, session_id: Name, path: Path, encoding: Encoding = "utf-8") -> str:
        """Read a file of a session's working folder."""
        with self._use(session_id) as session:
            data = await session.read_file(path)
            return data.decode() if encoding == "utf-8" else base64.b64encode(data).decode("ascii")

    async def list_files(self, session_id: Name) -> FileList:
        """List the files of a session's working folder, with their sizes in bytes."""
        with self._use(session_id) as session:
            return FileList(files=await session.list_files())

    async def close_session(self, session_id: Name) -> None:
        """Close a session; its variables and files are gone."""
        with self._use(session_id):
            await self._forget(session_id).close()

    @contextlib.contextmanager
    def _use(self, name: str) -> Iterator[Session]:
        """Find a session, and forget it if it turns out to have ended."""
        if name not in self._sessions:
            raise ToolError("this session has ended or never was: call open_session.")
        self._calls[name] += 1
        try:
            with _as_tool_errors():
                yield self._sessions[name]
        except ToolError as error:
            fault = error.__cause__
            if isinstance(fault, SandboxFault) and fault.kind is FaultKind.SESSION_ENDED and name in self._sessions:
                self._forget(name)
            raise
        finally:
            self._calls[name] -= 1
            if name in self._used:
                self._used[name] = time.monotonic()

    def _forget(self, name: str) -> Session:
        del self._used[name]
        self._calls = +self._calls
        return self._sessions.pop(name)


@contextlib.contextmanager
def _as_tool_errors() -> Iterator[None]:
    """Turn what a model can fix or should know into an error of the tool."""
    try:
        yield
    except UnicodeDecodeError:
        raise ToolError("the file is not UTF-8 text: read it with encoding='base64'.") from None
    except (SandboxFault, ValueError) as error:
        raise ToolError(_cut(str(error))) from error


def _show(outcome: CellOutcome) -> list[TextContent | ImageContent]:
    parts = [outcome.stdout, outcome.stderr]
    pictures = []
    room = SHOWN_PICTURES
    for forms in outcome.display:
        kind = next((kind for kind in PICTURES if kind in forms), None)
        if kind is None:
            parts.append(forms.get("text/plain", ""))
        elif (room := room - len(forms[kind])) >= 0 and _is_base64(forms[kind]):
            pictures.append(ImageContent(type="image", data=forms[kind], mime_type=kind))
        else:
            parts.append("[a picture is left out: too large, or not a picture]")
    if outcome.error is not None:
        parts.append("\n".join(outcome.error.traceback))
    if outcome.status is CellStatus.TIME_LIMIT:
        parts.append("[the time was up: the cell was interrupted]")
    elif outcome.status is CellStatus.ENDED:
        parts.append(f"[the session has ended {outcome.reason.value}]".replace(" ]", "]"))
    text = _cut("\n".join(part.rstrip("\n") for part in parts if part))
    return [*([TextContent(type="text", text=text)] if text or not pictures else []), *pictures]


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except ValueError:
        return False


def _cut(text: str) -> str:
    """Shorten a text, which must not hold halves of characters: they would break the connection."""
    if len(text) > SHOWN:
        half = SHOWN // 2
        text = f"{text[:half]}\n[{len(text) - SHOWN} characters left out]\n{text[-half:]}"
    return text.encode("utf-8", "replace").decode()
