"""A connection to an MCP server for callers without an event loop, by the official package; and recordings of calls."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

import anyio
import mcp
from anyio.from_thread import start_blocking_portal
from mcp.types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
)

from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.core.tasks import canonical_json
from spear_envs.data.files import find_last_line, hold_lock, read_regular
from spear_sandbox.web.endpoints import bound_answers

TOKEN_VARIABLE = "SPEAR_MCP_TOKEN"
"""Environment variable with the bearer token for servers over HTTP."""
_GRACE_S = 5.0


class McpFaultKind(str, Enum):
    """Faults of a server, which are not the policy's."""

    UNREACHABLE = "mcp_unreachable"
    """It cannot be started or reached, or does not list tools."""
    LOST = "mcp_lost"
    """It ended, or the connection did, in an episode."""
    TIMEOUT = "mcp_timeout"
    """A call took too long."""
    NOT_RECORDED = "mcp_not_recorded"
    """The recording lacks the call."""


@dataclass(frozen=True)
class ToolEntry:
    """A tool as the server lists it."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""


@dataclass(frozen=True)
class CallResult:
    """Result of a call: its texts, also of embedded files; of pictures and the like only the kind."""

    text: str
    is_error: bool


class McpSession:
    """One connection; a server that is a command is started and ended with it.

    Args:
        server: a command line, or the address of a server over streamable HTTP.
        seconds: for the start, and for each call.
        pass_variables: environment variables that a command gets besides ``PATH`` and the like.

    Raises:
        EnvFault: ``mcp_unreachable``.
    """

    def __init__(self, server: str, *, seconds: float, pass_variables: Sequence[str] = ()) -> None:
        self.server = server
        self.tools: list[ToolEntry] = []
        self._seconds = seconds
        self._variables = {name: os.environ[name] for name in pass_variables if name in os.environ}
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - a server writes there
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        try:
            self._client = self._stack.enter_context(self._portal.wrap_async_context_manager(self._open()))
        except Exception as error:
            self.close()
            why = str(_first_cause(error)) or f"no answer within {seconds:g} s"
            raise EnvFault(McpFaultKind.UNREACHABLE.value, f"{server}: {why}{self._quote()}") from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """Call a tool.

        Raises:
            EnvFault: ``mcp_lost`` or ``mcp_timeout``; the connection is closed then.
        """
        try:
            return self._portal.call(self._call, name, arguments)
        except Exception as error:
            if isinstance(error, mcp.MCPError) and _is_answer(error, self.server):
                return CallResult(error.message, is_error=True)
            self.close()
            if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
                text = f"{name} gave no result within {self._seconds:g} s"
                raise EnvFault(McpFaultKind.TIMEOUT.value, text) from error
            text = f"{self.server} ended in a call of {name} ({_first_cause(error)}){self._quote()}"
            raise EnvFault(McpFaultKind.LOST.value, text) from error

    def close(self) -> None:
        """End the connection, and its server if it was started."""
        with suppress(Exception):  # of a connection that broke, whose fault has been told
            self._stack.close()

    def _quote(self) -> str:
        """Return the last line of a started server on stderr."""
        end = os.fstat(self._said.fileno()).st_size  # of a log that may have grown for days
        said = os.pread(self._said.fileno(), 4000, max(0, end - 4000)).decode("utf-8", "replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return f"; it said: {lines[-1][:200]}" if lines else ""

    # ---------------------------------------------------------------- in the thread of the portal

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        # One scope around all, since those of the connection's task groups end inside of it.
        with anyio.CancelScope(deadline=anyio.current_time() + self._seconds) as scope:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._connect(stack))
                # Only texts are read: a structured result that breaks its schema does not end the connection.
                client.session.validate_tool_result = _accept  # type: ignore[method-assign, assignment]
                page = None
                while True:
                    listed = await client.list_tools(cursor=page)
                    self.tools += [ToolEntry(one.name, one.description or "", one.input_schema) for one in listed.tools]
                    page = listed.next_cursor
                    if not page:
                        break
                scope.deadline = float("inf")
                try:
                    yield client
                finally:
                    scope.deadline = anyio.current_time() + _GRACE_S
        if scope.deadline < float("inf") and scope.cancelled_caught:
            raise TimeoutError

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        with anyio.fail_after(self._seconds + _GRACE_S):
            result = await self._client.call_tool(name, dict(arguments), read_timeout_seconds=self._seconds)
        return CallResult("\n".join(map(_read_part, result.content)), bool(result.is_error))

    async def _connect(self, stack: AsyncExitStack) -> mcp.Client:
        if self.server.startswith(("http://", "https://")):
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            token = os.environ.get(TOKEN_VARIABLE)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=self._seconds))
            bound_answers(http)
            return mcp.Client(streamable_http_client(self.server, http_client=http))
        from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client

        command, *rest = shlex.split(self.server)
        variables = get_default_environment() | self._variables
        parameters = StdioServerParameters(command=command, args=rest, env=variables)
        return mcp.Client(stdio_client(parameters, errlog=self._said))


def _is_answer(error: mcp.MCPError, server: str) -> bool:
    """Return whether a server gave this error itself: it refuses the arguments, or has an error of its own.

    The package makes errors for connections that broke: with two codes, and over HTTP with some more. One of these,
    of internal errors, is also what servers of the TypeScript package answer where a tool throws.
    """
    if not server.startswith(("http://", "https://")):
        return error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT)
    if error.code == INTERNAL_ERROR:
        return error.message != "Server returned an error response"
    return error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT, PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND)


def _read_part(part: Any) -> str:
    """Return the text of a part of a result, which may be that of an embedded file; else its kind."""
    text = getattr(part.resource if part.type == "resource" else part, "text", None)
    return f"({part.type})" if text is None else str(text)


async def _accept(_name: str, _result: Any) -> None:
    """Accept any result of a tool."""


def _first_cause(error: BaseException) -> BaseException:
    """Unwrap an error from the exception groups of task groups."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return error


class Recording:
    """JSON lines: the tools in the first, then a call in each, identified by its task and the calls before it.

    Several processes may write one; a last line that a kill or a full disk cut off is left out.

    Args:
        path: of the file; :meth:`add_tools` begins a new one.

    Raises:
        SpearError: the file is not a recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tools: list[ToolEntry] | None = None
        self._calls: dict[str, CallResult] = {}
        self._lock = threading.Lock()
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            # Not splitlines(), which also parts texts at the line ends of Unicode.
            *lines, last = read_regular(self.path, 2**40).split(b"\n")
            if _is_json(last):
                lines.append(last)
            if not any(lines):
                return
            first, *rest = filter(None, lines)
            self.tools = [ToolEntry(**entry) for entry in json.loads(first)["tools"]]
            for line in rest:
                call = json.loads(line)
                self._calls[call["key"]] = CallResult(**call["result"])
        except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
            text = f"is not a recording of an MCP server's calls ({type(error).__name__}: {error}): record it again."
            raise SpearError(f"{self.path} {text}") from error

    def add_tools(self, tools: Sequence[ToolEntry]) -> None:
        """Begin a recording.

        Raises:
            SpearError: it exists, with other tools.
        """
        with self._open() as file:
            if self.tools is None:
                self._read()  # another process may have begun it meanwhile
            if self.tools is None:
                file.write(_write_line({"tools": [asdict(entry) for entry in tools]}))
                self.tools = list(tools)
        if self.tools != list(tools):
            raise SpearError(f"{self.path} was recorded with other tools: name another file.")

    def add(self, task: str, calls: Sequence[Mapping[str, Any]], result: CallResult) -> None:
        """Record the result of the last of an episode's calls."""
        key = _find_key(task, calls)
        if key not in self._calls:
            name, arguments = calls[-1]["tool"], calls[-1]["arguments"]
            about = {"key": key, "task": task, "name": name, "arguments": arguments, "result": asdict(result)}
            with self._open() as file:
                file.write(_write_line(about))
            self._calls[key] = result

    def find(self, task: str, calls: Sequence[Mapping[str, Any]]) -> CallResult:
        """Find the result of the last of an episode's calls.

        Raises:
            EnvFault: ``mcp_not_recorded``.
        """
        found = self._calls.get(_find_key(task, calls))
        if found is None:
            text = f"{self.path} lacks the call {calls[-1]['tool']} after these {len(calls) - 1} of {task}"
            raise EnvFault(McpFaultKind.NOT_RECORDED.value, text)
        return found

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """Open the file to append lines, for no other process at the same time."""
        with self._lock, hold_lock(self.path, on_wait=lambda: None), self.path.open("a+b") as file:
            _end_line(file)
            yield file


def _write_line(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _end_line(file: IO[bytes]) -> None:
    """Complete the last line, or cut off a torn one."""
    start = find_last_line(file)
    file.seek(start)
    line = file.read()
    if _is_json(line):
        file.write(b"\n")
    elif line:
        file.truncate(start)


def _find_key(task: str, calls: Sequence[Mapping[str, Any]]) -> str:
    played = [[call["tool"], call["arguments"]] for call in calls]
    return hashlib.sha256(canonical_json([task, played]).encode()).hexdigest()[:32]
