"""Sessions and notebooks whose clients leave, wait, or ask for what is not theirs."""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from spear_sandbox.client import HttpSession
from spear_sandbox.guest import interpreter
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.protocol import CellOutcome, CellStatus, FaultKind, KillReason, Limits, SandboxFault
from spear_sandbox.service.cells import CellService, SessionTable

CELL_S = 0.05


def finish(status: CellStatus = CellStatus.FINISHED) -> CellOutcome:
    return CellOutcome(status, "", "", (), None, CELL_S, False, KillReason.NONE)


class Played:
    """A session whose cells take a while, and whose files cannot be read."""

    id, alive, busy, used = "a" * 32, True, False, 0.0

    async def run(self, code: str, *, timeout_s: float, place: Callable[[], Any]) -> CellOutcome:
        async with place():
            await asyncio.sleep(min(CELL_S, timeout_s))
            return finish(CellStatus.FINISHED if timeout_s >= CELL_S else CellStatus.TIME_LIMIT)

    async def read_file(self, name: str) -> bytes:
        raise SandboxFault(FaultKind.SESSION_ENDED, "over")

    async def close(self) -> None:
        pass


class Opener:
    async def open_session(self, **_: Any) -> Any:
        return Played()


def play_notebook(asked: dict[str, Any], place: Callable[[], Any]) -> dict[str, Any]:
    async def play() -> Any:
        table: Any = SessionTable(Opener(), most=1, idle_s=60)  # type: ignore[arg-type]
        cells = CellService(table, Limits(), longest_s=300, place=place)
        return await cells.play_notebook(json.dumps(asked).encode())

    said: dict[str, Any] = json.loads(bytes(asyncio.run(play()).body))
    return said


def test_a_notebook_does_not_time_out_while_it_waits() -> None:
    @contextlib.asynccontextmanager
    async def wait() -> AsyncIterator[None]:
        await asyncio.sleep(0.3)
        yield

    said = play_notebook({"cells": ["1"] * 4, "total_timeout": 0.5}, wait)
    assert said["status"] == "Success" and len(said["cells"]) == 4


def test_cells_count_where_the_session_ends_before_its_files_are_read() -> None:
    said = play_notebook({"cells": ["1"], "fetch_files": ["f", "g"]}, contextlib.nullcontext)
    assert said["status"] == "Success" and len(said["cells"]) == 1 and said["files"] == {}


def test_a_pipe_is_no_file_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("f")
    Path("g").write_bytes(b"g")
    said: list[str] = []

    def read() -> None:
        with pytest.raises(ValueError, match="regular") as caught:
            interpreter.read_file("f")
        said.append(str(caught.value))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(5)
    assert said and interpreter.read_file("g") == [("content", b"g")]


def test_names_of_files_stay_below_the_session() -> None:
    sent: list[str] = []

    async def send(method: str, path: str, body: Any, seconds: float) -> Any:
        sent.append(path)
        return SimpleNamespace(content=b"{}")

    session = HttpSession(send, "a" * 32, cell_s=1, slack_s=1)
    for work in (lambda: session.read_file("../../../metrics"), lambda: session.write_file("../run", b"")):
        with pytest.raises(ValueError, match="leaves the working"):
            asyncio.run(work())
    assert not sent
    asyncio.run(session.read_file("a/b"))
    assert sent


def test_a_session_outlives_a_client_that_leaves_while_its_cell_is_sent() -> None:
    async def work() -> None:
        executor = LocalExecutor(zygotes=1)
        try:
            session = await executor.open_session()
            await session.run("x = 5")
            for wait_s in (0.0, 0.002):
                left = asyncio.ensure_future(session.run("#" + "a" * 4_000_000))
                for seconds in (wait_s, 0, 0):
                    await asyncio.sleep(seconds)
                left.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await left
                outcome = await session.run("print(x)")
                assert (outcome.status, outcome.stdout) == (CellStatus.FINISHED, "5\n"), outcome
        finally:
            await executor.close()

    asyncio.run(work())


def test_a_session_that_works_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="needs the extra 'mcp'")
    from spear_sandbox.service import mcp_server

    now, closed = [0.0], []
    monkeypatch.setattr(mcp_server.time, "monotonic", lambda: now[0])

    class Session:
        id = "s1"

        async def run(self, code: str, *, timeout_s: float | None = None) -> CellOutcome:
            now[0] += 500
            return finish()

        async def close(self) -> None:
            closed.append(self.id)

    class Executor:
        async def open_session(self, **_: Any) -> Any:
            return Session()

    async def work() -> None:
        executor: Any = Executor()
        server = mcp_server.make_mcp_server(executor, most_sessions=1, limits=Limits(wall_s=600))
        await server.call_tool("open_session", {})
        await server.call_tool("run_cell", {"session_id": "s1", "code": "x", "timeout": 600})
        now[0] += 150
        with pytest.raises(Exception, match="in use"):
            await server.call_tool("open_session", {})

    asyncio.run(work())
    assert not closed
