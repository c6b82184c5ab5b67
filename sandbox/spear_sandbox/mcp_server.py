"""The sandbox as tools of the Model Context Protocol, by the official package ``mcp``."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal, Protocol

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from spear_sandbox.protocol import CellOutcome, CellStatus, Executor, Limits, RunStatus, SandboxFault, Session
from spear_sandbox.wire import read_base64

PICTURES = ("image/png", "image/jpeg")
SHOWN = 64 << 10
"""Characters of each stream in a tool's result; a note tells how many are left out."""

Code = Annotated[str, Field(description="Python source.")]
Name = Annotated[str, Field(description="What open_session gave.")]
Path = Annotated[str, Field(description="Relative name of a file in the working folder.", min_length=1)]
Encoding = Annotated[Literal["utf-8", "base64"], Field(description="How the content is written.")]


class SessionExecutor(Executor, Protocol):
    """Runs programs and opens sessions: a private pool, or a client of a service."""

    async def open_session(self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None) -> Session:
        """See :meth:`spear_sandbox.local.LocalExecutor.open_session`."""
        ...


class RunResult(BaseModel):
    """What a program did."""

    status: str
    """``Finished``, or ``TimeLimitExceeded``."""
    exit_code: int | None
    stdout: str
    stderr: str


class FileList(BaseModel):
    """Files of a session and their bytes."""

    files: dict[str, int]


def make_mcp_server(executor: SessionExecutor, *, most_sessions: int = 16, longest_s: float = 300.0) -> MCPServer[Any]:
    """Make the server; any number of clients may call it at once. The executor is not closed.

    Opening more than ``most_sessions`` closes the oldest. A program or cell may take ``longest_s`` seconds.
    """
    server: MCPServer[Any] = MCPServer("spear-sandbox", version=version("spear-sandbox"), log_level="WARNING")
    tools = _Tools(executor, most_sessions, longest_s)
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

    def __init__(self, executor: SessionExecutor, most_sessions: int, longest_s: float) -> None:
        self._executor = executor
        self._most = most_sessions
        self._longest_s = longest_s
        self._sessions: dict[str, Session] = {}

    async def run_code(
        self,
        code: Code,
        stdin: Annotated[str, Field(description="What the program can read.")] = "",
        timeout: Annotated[float, Field(description="Seconds.", gt=0)] = 30.0,
    ) -> RunResult:
        """Run a Python program in a fresh sandbox without network. Print what you want to see; nothing is kept."""
        limits = Limits(wall_s=min(timeout, self._longest_s))
        with _as_tool_errors():
            outcome = await self._executor.run(code, stdin=stdin, limits=limits)
        status = RunStatus(outcome.status).value
        return RunResult(
            status=status, exit_code=outcome.return_code, stdout=_cut(outcome.stdout), stderr=_cut(outcome.stderr)
        )

    async def open_session(self) -> str:
        """Open a Python session that keeps variables and files from cell to cell. Returns its id."""
        with _as_tool_errors():
            while len(self._sessions) >= self._most:
                await self._sessions.pop(next(iter(self._sessions))).close()
            session = await self._executor.open_session(limits=Limits(wall_s=self._longest_s))
        self._sessions[session.id] = session
        return session.id

    async def run_cell(
        self, session_id: Name, code: Code, timeout: Annotated[float, Field(description="Seconds.", gt=0)] = 60.0
    ) -> list[TextContent | ImageContent]:
        """Run a cell in a session, as a notebook does: the value of a last expression and plots are shown."""
        with _as_tool_errors():
            outcome = await self._find(session_id).run(code, timeout_s=timeout)
        if outcome.status is CellStatus.ENDED:
            self._sessions.pop(session_id, None)
        return _show(outcome)

    async def write_file(
        self,
        session_id: Name,
        path: Path,
        content: Annotated[str, Field(description="What to write.")],
        encoding: Encoding = "utf-8",
    ) -> None:
        """Write a file into a session's working folder."""
        with _as_tool_errors():
            data = content.encode() if encoding == "utf-8" else read_base64(content)
            await self._find(session_id).write_file(path, data)

    async def read_file(self, session_id: Name, path: Path, encoding: Encoding = "utf-8") -> str:
        """Read a file of a session's working folder."""
        with _as_tool_errors():
            data = await self._find(session_id).read_file(path)
            return data.decode() if encoding == "utf-8" else base64.b64encode(data).decode("ascii")

    async def list_files(self, session_id: Name) -> FileList:
        """List the files of a session's working folder, with their sizes in bytes."""
        with _as_tool_errors():
            return FileList(files=await self._find(session_id).list_files())

    async def close_session(self, session_id: Name) -> None:
        """Close a session; its variables and files are gone."""
        with _as_tool_errors():
            session = self._find(session_id)
            self._sessions.pop(session_id, None)
            await session.close()

    def _find(self, name: str) -> Session:
        if name not in self._sessions:
            raise ToolError("there is no such session (any more): call open_session.")
        return self._sessions[name]


@contextlib.contextmanager
def _as_tool_errors() -> Iterator[None]:
    """Turn what a model can fix or should know into an error of the tool."""
    try:
        yield
    except UnicodeDecodeError:
        raise ToolError("the file is not UTF-8 text: read it with encoding='base64'.") from None
    except (SandboxFault, ValueError) as error:
        raise ToolError(str(error)) from error


def _show(outcome: CellOutcome) -> list[TextContent | ImageContent]:
    parts = [outcome.stdout, outcome.stderr]
    pictures = []
    for forms in outcome.display:
        kind = next((kind for kind in PICTURES if kind in forms), None)
        if kind is None:
            parts.append(forms.get("text/plain", ""))
        else:
            pictures.append(ImageContent(type="image", data=forms[kind], mime_type=kind))
    if outcome.error is not None:
        parts.append("\n".join(outcome.error.traceback))
    if outcome.status is CellStatus.TIME_LIMIT:
        parts.append("[the time was up: the cell was interrupted]")
    elif outcome.status is CellStatus.ENDED:
        parts.append(f"[the session has ended {outcome.reason.value}]".replace(" ]", "]"))
    text = "\n".join(_cut(part).rstrip("\n") for part in parts if part)
    return [*([TextContent(type="text", text=text)] if text or not pictures else []), *pictures]


def _cut(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[{len(text) - SHOWN} characters left out]\n{text[-half:]}"
