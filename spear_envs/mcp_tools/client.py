"""A connection to an MCP server, by the official package ``mcp``, for callers without an event loop."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedLongEnough
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear_envs.core.errors import EnvFault, SpearError
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
    """Result of a call: its texts; of pictures and the like only the kind."""

    text: str
    is_error: bool


class McpSession:
    """One connection; a server that is a command is started and ended with it.

    Args:
        server: a command line, or the address of a server over streamable HTTP.
        pass_variables: environment variables that a command gets besides ``PATH`` and the like.

    Raises:
        EnvFault: ``mcp_unreachable``.
        SpearError: the package ``mcp`` is not installed.
    """

    def __init__(self, server: str, *, seconds: float, pass_variables: Sequence[str] = ()) -> None:
        self.server = server
        self._seconds = seconds
        self._variables = {name: os.environ[name] for name in pass_variables if name in os.environ}
        self._opened: Future[list[ToolEntry]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: asyncio.Queue[tuple[str, Mapping[str, Any], Future[CallResult]] | None] | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - a server writes there
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise SpearError(
                "an environment with the tools of an MCP server needs: pip install 'spear-envs[mcp]'"
            ) from error
        self._thread = threading.Thread(target=self._run, name=f"mcp-{server[:40]}", daemon=True)
        self._thread.start()
        try:
            self.tools = self._opened.result(seconds)
        except Exception as error:
            self.close()
            why = str(_first_cause(error)) or f"no answer within {seconds:g} s"
            raise EnvFault(McpFaultKind.UNREACHABLE.value, f"{server}: {why}{self._quote()}") from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """Call a tool.

        Raises:
            EnvFault: ``mcp_lost`` or ``mcp_timeout``; the connection is closed then.
        """
        answer: Future[CallResult] = Future()
        try:
            assert self._loop is not None and self._jobs is not None
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, (name, arguments, answer))
            if not self._thread.is_alive():
                raise RuntimeError("the connection has ended")
            return answer.result(self._seconds + _GRACE_S)
        except (TimeoutError, WaitedLongEnough) as error:
            self.close()
            told = f"{name} gave no result within {self._seconds:g} s"
            raise EnvFault(McpFaultKind.TIMEOUT.value, told) from error
        except Exception as error:
            self.close()
            told = f"{self.server} ended in a call of {name} ({_first_cause(error)}){self._quote()}"
            raise EnvFault(McpFaultKind.LOST.value, told) from error

    def close(self) -> None:
        """End the connection, and its server if it was started."""
        if self._loop is None or self._jobs is None or self._serving is None:
            return
        with suppress(RuntimeError):  # its loop has ended
            if self._opened.done():
                self._loop.call_soon_threadsafe(self._jobs.put_nowait, None)
                self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._serving.cancel)
                self._thread.join(_GRACE_S)

    def _quote(self) -> str:
        """The last line of a started server on stderr."""
        try:
            self._said.seek(0)
            lines = [line.strip() for line in self._said.read()[-4000:].splitlines() if line.strip()]
        except ValueError:
            return ""
        return f"; it said: {lines[-1][:200]}" if lines else ""

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._fail(error if isinstance(error, Exception) else ConnectionError("the connection is lost"))
        else:
            self._fail(RuntimeError("the connection has ended"))

    def _fail(self, error: Exception) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
        while self._jobs is not None and not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is not None:
                job[2].set_exception(error)

    async def _serve(self) -> None:
        self._jobs, self._serving, self._loop = asyncio.Queue(), asyncio.current_task(), asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(await self._connect(stack))
            entries, page = [], None
            while True:
                listed = await client.list_tools(cursor=page)
                entries += [ToolEntry(tool.name, tool.description or "", tool.input_schema) for tool in listed.tools]
                page = listed.next_cursor
                if not page:
                    break
            self._opened.set_result(entries)
            while (job := await self._jobs.get()) is not None:
                name, arguments, answer = job
                try:
                    asked = client.call_tool(name, dict(arguments), read_timeout_seconds=self._seconds)
                    result = await asyncio.wait_for(asked, self._seconds)
                    answer.set_result(CallResult(_write_content(result.content), bool(result.is_error)))
                except asyncio.CancelledError:  # by the task group of a connection that has broken
                    answer.set_exception(ConnectionError("the connection is lost"))
                    raise
                except Exception as error:
                    answer.set_exception(TimeoutError() if _is_timeout(error) else error)

    async def _connect(self, stack: AsyncExitStack) -> Any:
        from mcp import Client

        if self.server.startswith(("http://", "https://")):
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            token = os.environ.get(TOKEN_VARIABLE)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=self._seconds))
            bound_answers(http)
            return Client(streamable_http_client(self.server, http_client=http))
        from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client

        command, *rest = shlex.split(self.server)
        variables = get_default_environment() | self._variables
        parameters = StdioServerParameters(command=command, args=rest, env=variables)
        return Client(stdio_client(parameters, errlog=self._said))


def _write_content(content: Sequence[Any]) -> str:
    return "\n".join(part.text if part.type == "text" else f"({part.type})" for part in content)


def _is_timeout(error: BaseException) -> bool:
    from mcp.shared.exceptions import MCPError

    # Three classes before Python 3.11.
    return isinstance(error, (TimeoutError, asyncio.TimeoutError)) or (
        isinstance(error, MCPError) and "timed out" in str(error).lower()
    )


def _first_cause(error: BaseException) -> BaseException:
    """Unwrap an error from the exception groups of task groups."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return error
