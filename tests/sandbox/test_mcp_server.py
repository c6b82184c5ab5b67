"""``spear sandbox mcp``, asked by the official client."""

import asyncio
import base64
import os
import sys
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

import httpx
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from spear_sandbox.client import HttpExecutor
from spear_sandbox.protocol import FaultKind, Limits, Outcome, SandboxFault
from spear_sandbox.service.mcp_server import SHOWN, make_mcp_server
from tests import commands
from tests.sandbox.service import need_isolation, run_local

PICTURE = """
class Picture:
    def _repr_png_(self): return b"\\x89PNG"
Picture()
"""


async def check(client: Client) -> None:
    names = {tool.name for tool in (await client.list_tools()).tools}
    assert names == {"run_code", "open_session", "run_cell", "write_file", "read_file", "list_files", "close_session"}

    async def call(name: str, **arguments: Any) -> Any:
        return await client.call_tool(name, arguments)

    ran = (await call("run_code", code="print(input()); raise SystemExit(3)", stdin="in")).structured_content
    assert ran == {"status": "Finished", "exit_code": 3, "stdout": "in\n", "stderr": ""}
    late = (await call("run_code", code="while True: pass", timeout=0.3)).structured_content
    assert late["status"] == "TimeLimitExceeded" and late["exit_code"] is None
    session = (await call("open_session")).structured_content["result"]
    await call("write_file", session_id=session, path="a.txt", content="zwölf")
    shown = await call("run_cell", session_id=session, code="x = open('a.txt').read(); print(1); x")
    assert shown.content[0].text == "1\n'zwölf'"
    failed = await call("run_cell", session_id=session, code="x[9]")
    assert "IndexError" in failed.content[0].text and not failed.is_error
    (picture,) = (await call("run_cell", session_id=session, code=PICTURE)).content
    assert picture.mime_type == "image/png" and base64.b64decode(picture.data) == b"\x89PNG"
    await call("run_cell", session_id=session, code="open('b', 'wb').write(b'\\xff')")
    assert (await call("list_files", session_id=session)).structured_content == {"files": {"a.txt": 6, "b": 1}}
    assert (await call("read_file", session_id=session, path="b")).is_error
    read = await call("read_file", session_id=session, path="b", encoding="base64")
    assert read.structured_content["result"] == "/w=="
    await call("write_file", session_id=session, path="c", content="/w==\n", encoding="base64")
    assert (await call("list_files", session_id=session)).structured_content["files"]["c"] == 1
    for arguments in (
        {"path": "../x"},
        {"path": "/etc/passwd"},
        {"path": "missing"},
        {"path": "a.txt", "session_id": "x"},
    ):
        assert (await call("read_file", **{"session_id": session, **arguments})).is_error
    ended = await call("run_cell", session_id=session, code="import os; os._exit(1)")
    assert "ended" in ended.content[0].text
    assert (await call("run_cell", session_id=session, code="1")).is_error
    other = (await call("open_session")).structured_content["result"]
    assert not (await call("close_session", session_id=other)).is_error
    assert (await call("close_session", session_id=other)).is_error


async def check_answers(client: Client, session: str) -> None:
    """Whatever a cell shows, its answer is of bounded size and the connection lives."""

    async def run(code: str) -> Any:
        return await client.call_tool("run_cell", {"session_id": session, "code": code})

    assert "?" in (await run("raise Exception('half \\ud800')")).content[0].text.replace("\ufffd", "?")
    many = await run("for k in range(300): display('x' * 60_000)\nprint('y' * 100_000)")
    assert sum(len(part.text) for part in many.content) < 2 * SHOWN
    forged = "class A:\n def _repr_png_(self): return {}\nA()"
    for picture in ("'not base64 \\u2603'", "bytes(12 << 20)"):
        shown = await run(forged.format(picture))
        assert [part.type for part in shown.content] == ["text"] and "left out" in shown.content[0].text
    assert (await run("6 * 7")).content[0].text == "42"


@pytest.mark.slow
def test_a_client_that_starts_the_command() -> None:
    need_isolation()

    async def go() -> None:
        command = ["-m", "spear_sandbox", "mcp"]
        parameters = StdioServerParameters(command=sys.executable, args=command, env={**os.environ}, cwd=commands.ROOT)
        async with Client(stdio_client(parameters)) as client:
            await check(client)
            await check_answers(client, (await client.call_tool("open_session", {})).structured_content["result"])

    asyncio.run(go())


@pytest.mark.slow
def test_over_http_with_a_token() -> None:
    need_isolation()

    async def go(url: str) -> None:
        async with (
            httpx.AsyncClient(headers={"Authorization": "Bearer s3cret"}, timeout=60) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
        ):
            await check(client)

    with commands.run_command("sandbox", "--http", verb="mcp", SPEAR_SANDBOX_TOKEN="s3cret") as running:
        assert httpx.post(f"{running.url}/mcp", json={}).status_code == 401
        asyncio.run(go(running.url))


def test_over_a_service_of_sandboxes() -> None:
    async def go(url: str) -> None:
        executor = HttpExecutor(url)
        async with Client(make_mcp_server(executor, most_sessions=1)) as client:
            await check(client)
            first = (await client.call_tool("open_session", {})).structured_content["result"]
            assert (await client.call_tool("open_session", {})).is_error, "it would take another client's place"
            await check_answers(client, first)
        await executor.close()

    with run_local(Limits(wall_s=30.0), 2) as running:
        asyncio.run(go(running.url))


def test_programs_and_sessions_get_the_limits_of_the_server() -> None:
    class Keeping:
        """An executor that keeps the limits that it was given, and starts nothing."""

        def __init__(self) -> None:
            self.seen: list[Limits] = []

        async def run(self, code: str, *, stdin: str = "", limits: Limits) -> Outcome:
            self.seen.append(limits)
            raise SandboxFault(FaultKind.UNAVAILABLE, "nothing is started here")

        async def open_session(self, *, files: Any = None, limits: Limits) -> Any:
            self.seen.append(limits)
            raise SandboxFault(FaultKind.UNAVAILABLE, "nothing is started here")

    async def go() -> list[Limits]:
        executor: Any = Keeping()
        async with Client(make_mcp_server(executor, limits=Limits(wall_s=60.0, memory_mb=4096))) as client:
            await client.call_tool("run_code", {"code": "1", "timeout": 5})
            await client.call_tool("open_session", {})
        return executor.seen

    assert [(limits.wall_s, limits.memory_mb) for limits in asyncio.run(go())] == [(5.0, 4096), (60.0, 4096)]
