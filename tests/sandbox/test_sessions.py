"""Sessions: what cells do, what a session keeps, when it ends, and the same over HTTP."""

import asyncio
import base64
import contextlib
import gc
import os
import signal
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor
from spear_sandbox.protocol import CellStatus, FaultKind, KillReason, Limits, SandboxFault

LIMITS = Limits(wall_s=10.0, memory_mb=256)


def play(*checks: Callable[[LocalExecutor], Awaitable[None]], **options: Any) -> None:
    """Start one pool and let all of these use it."""

    async def go() -> None:
        executor = LocalExecutor("namespaces", limits=LIMITS, zygotes=1, **options)
        try:
            await executor.start()
        except IsolationRefusedError as error:
            pytest.skip(f"no namespaces here: {error}")
        try:
            for check in checks:
                await asyncio.wait_for(check(executor), 60)
        finally:
            await executor.close()

    asyncio.run(go())


async def play_cells(executor: LocalExecutor) -> None:
    session = await executor.open_session(files={"given/a.txt": b"in"})
    outcome = await session.run("import os\nx = 41\nprint('out', flush=True); os.system('echo sub >&2'); x + 1")
    assert (outcome.stdout, outcome.stderr) == ("out\n", "sub\n")
    assert outcome.display == ({"text/plain": "42"},) and outcome.status is CellStatus.FINISHED
    assert (await session.run("print(_, open('given/a.txt').read(), os.listdir('.'))")).stdout == "42 in ['given']\n"
    error = (await session.run("def f():\n    return 1 / 0\nf()")).error
    assert error is not None and (error.name, error.message) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in "\n".join(error.traceback) and "/tmp/main.py" not in "\n".join(error.traceback)
    assert (await session.run("class A:\n def _repr_html_(self): return '<b>'\nA()")).display[0]["text/html"] == "<b>"
    assert (await session.run("import asyncio\nawait asyncio.sleep(0, 'awaited')")).display[0] == {
        "text/plain": "'awaited'"
    }
    assert (await session.run("input()")).error.name == "EOFError"  # type: ignore[union-attr]
    error = (await session.run("x = ")).error
    assert error is not None and error.name == "SyntaxError" and "ast.py" not in "\n".join(error.traceback)
    assert (await session.run("exit()")).error.name == "SystemExit"  # type: ignore[union-attr]
    assert (await session.run("x")).display[0]["text/plain"] == "41", "it has outlived them all"
    await session.close()


async def keep_files(executor: LocalExecutor) -> None:
    session = await executor.open_session()
    await session.write_file("d/data.bin", bytes(range(256)) * 4096)
    outcome = await session.run("data = open('d/data.bin', 'rb').read()\nlen(data)\nopen('made', 'w').write('me');")
    assert outcome.error is None and outcome.display == ()
    assert await session.list_files() == {"d/data.bin": 1 << 20, "made": 2}
    assert await session.read_file("d/data.bin") == bytes(range(256)) * 4096
    for name in ("../x", "/etc/passwd", "missing", "d"):
        with pytest.raises(ValueError, match="file"):
            await session.read_file(name)
    with pytest.raises(ValueError, match="MiB"):
        await session.write_file("large", bytes(9 << 20))
    await session.run("import os; os.mkfifo('unread'); os.mkfifo('read'); end = os.open('read', os.O_RDWR)")
    for name in ("unread", "read"):
        with pytest.raises(ValueError, match="refused"):
            await session.write_file(name, bytes(100_000))
    other = await executor.open_session()
    assert await other.list_files() == {} and (await other.run("data")).error is not None, "nothing is shared"


async def stop_cells(executor: LocalExecutor) -> None:
    session = await executor.open_session()
    late = await session.run("kept = 1\nwhile True: pass", timeout_s=0.3)
    assert late.status is CellStatus.TIME_LIMIT and late.error is not None
    running = asyncio.ensure_future(session.run("print('begun', flush=True)\nimport time; time.sleep(20)"))
    await asyncio.sleep(1.0)  # until it has begun
    await session.interrupt()
    stopped = await running
    assert stopped.error is not None and stopped.error.name == "KeyboardInterrupt" and stopped.stdout == "begun\n"
    assert (await session.run("kept")).display[0]["text/plain"] == "1"
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    ended = await session.run(stubborn, timeout_s=0.2)
    assert (ended.status, ended.reason) == (CellStatus.ENDED, KillReason.TIMEOUT)
    with pytest.raises(SandboxFault) as caught:
        await session.run("1")
    assert caught.value.kind is FaultKind.SESSION_ENDED and not session.alive


async def end_at_limits(executor: LocalExecutor) -> None:
    many = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(200 << 20); held[::4096] = b"x" * (200 << 8); time.sleep(20); os._exit(0)
time.sleep(20)
"""
    for code, reason in (
        (many, KillReason.MEMORY),
        ("while True: print('x' * 10000)", KillReason.OUTPUT),
        ("import os; os._exit(0)", KillReason.NONE),
        ("import os; os.kill(os.getpid(), 11)", KillReason.NONE),
    ):
        session = await executor.open_session()
        outcome = await session.run(code)
        assert (outcome.status, outcome.reason) == (CellStatus.ENDED, reason), code
    session = await executor.open_session()
    assert (await session.run("bytearray(1 << 30)")).error.name == "MemoryError"  # type: ignore[union-attr]
    assert (await session.run("'still there'")).display != ()
    large = await session.run("print('y' * (2 << 20))")
    assert large.truncated and len(large.stdout) == executor.limits.kept_output
    assert (await session.run("1")).stdout == "", "nothing of the former cell"


async def end_while_the_loop_is_busy(executor: LocalExecutor) -> None:
    """The output, the end of the pipe and the end of the process are seen in one round of the event loop."""
    for held in (0.05, 0.1):
        session = await executor.open_session()
        cell = asyncio.ensure_future(session.run("import os, time; time.sleep(0.05); os.write(1, b'bye'); os._exit(1)"))
        await asyncio.sleep(0.045)
        time.sleep(held)
        outcome = await cell
        assert (outcome.status, outcome.stdout) == (CellStatus.ENDED, "bye")


async def rest_between_cells(executor: LocalExecutor) -> None:
    """No processor between cells: neither threads, nor children, nor what a timer of its own wakes."""
    session = await executor.open_session()
    code = """
import os, signal, threading, time
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
if os.fork() == 0:
    signal.signal(signal.SIGALRM, lambda *_: None)
    spin()
"""
    await session.run(code)
    before = find_cpu(session._pidfd)
    await asyncio.sleep(1.0)
    assert find_cpu(session._pidfd) - before < 0.2
    started = time.monotonic()
    assert (await session.run("6 * 7")).display == ({"text/plain": "42"},)
    assert time.monotonic() - started < 5
    await session.close()


def find_cpu(pidfd: int | None) -> float:
    """CPU seconds of all processes below a session's supervisor so far."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        top = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
    total, todo = 0, [top]
    while todo:
        process = todo.pop()
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                todo += map(int, file.read().split())
    return total / os.sysconf("SC_CLK_TCK")


FIND_SOCKET = """
import os, struct, time
for fd in range(3, 20):
    try:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("socket"): break
    except OSError: pass
def send(data):
    view = memoryview(data)
    while view: view = view[os.write(fd, view):]
"""


async def forge_answers(executor: LocalExecutor) -> None:
    """The program has the socket if it looks for it; what it writes there ends or harms its own session only."""
    one = "struct.pack('<IIIII', 2, 1, 13, 5, 0) + b'shown'"
    for code in (
        "send(struct.pack('<III', 9, 0, 0)); time.sleep(5)",  # of another question
        "send(struct.pack('<III', 2, 1 << 30, 1 << 31)); time.sleep(5)",  # more than an answer may have
        "send(struct.pack('<III', 2, 3, 8) + bytes(8)); time.sleep(5)",  # no room for its own table
        "send(struct.pack('<IIIII', 2, 1, 13, 400, 1) + b'shown'); time.sleep(5)",  # sizes beyond its end
        f"send({one} + b'left'); time.sleep(5)",  # and something nobody asked for
        "while True: send(bytes(1 << 16))",
    ):
        session = await executor.open_session()
        await session.run(FIND_SOCKET)
        outcome = await session.run(code)
        with pytest.raises(SandboxFault) as caught:
            await session.run("1")
            await session.list_files()
        assert caught.value.kind is FaultKind.SESSION_ENDED and outcome.error is None, code
    session = await executor.open_session()
    await session.run(FIND_SOCKET)
    forged = await session.run(f"send({one}); time.sleep(60)")
    assert forged.display == ({},) and forged.wall_s < 5
    assert (await executor.run("print(1)")).stdout == "1\n"


async def bound_answers(executor: LocalExecutor) -> None:
    session = await executor.open_session()
    for code in (
        "for _ in range(100_000): display(1)",
        "display('x' * (25 << 20))",
        "raise ValueError('x' * (25 << 20))",
    ):
        error = (await session.run(code)).error
        assert error is not None and error.name == "OutputError", code
    large = await session.run("display('\\u20ac' * (7 << 20))")
    assert len(large.display[0]["text/plain"]) == (7 << 20) + 2
    halves = await session.run("print(1)\n'a\\ud83d\\ude00b\\ud800'\nraise ValueError('\\ud800')")
    assert halves.error is not None and halves.error.message == "\ufffd"
    await session.run("open('f', 'wb').write(b'x' * (13 << 20)); open('a\\nb', 'w').write('in')")
    await session.run("open(b'\\xff', 'w'); open('\\ufffd', 'w')")
    with pytest.raises(ValueError, match="MiB"):
        await session.read_file("f")
    assert await session.list_files() == {"f": 13 << 20, "a\nb": 2}
    assert await session.read_file("a\nb") == b"in"
    await session.close()


async def forget_closed_sessions(executor: LocalExecutor) -> None:
    """Nothing keeps a session that has ended, nor what it showed, not even until the next collection."""
    gc.collect()
    gc.disable()
    try:
        session = await executor.open_session()
        outcome = await session.run("display('x' * (5 << 20))")
        await session.close()
        kept = weakref.ref(session)
        del session, outcome
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()


async def interrupt_at_once(executor: LocalExecutor) -> None:
    """An interruption that comes before the cell has begun is not lost."""
    for _ in range(5):
        session = await executor.open_session()
        first = await session.run("import time\nfor _ in range(1000): time.sleep(0.01)", timeout_s=0.001)
        assert first.status is CellStatus.TIME_LIMIT and first.error is not None
        running = asyncio.ensure_future(session.run("import time; time.sleep(9)"))
        while not session.running:
            await asyncio.sleep(0)
        await session.interrupt()
        assert (await running).error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
        assert (await session.run("'later'")).error is None
        await session.close()


TIMERS = """
import ctypes, os, signal, threading, time
C = ctypes.CDLL(None)
class Event(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("value", "more", "number", "kind")] + [("rest", ctypes.c_int * 13)]
def wake(milliseconds):
    event, timer = Event(number=int(signal.SIGCONT)), ctypes.c_int()
    assert C.syscall(222, 1, ctypes.byref(event), ctypes.byref(timer)) == 0
    times = (ctypes.c_long * 4)(0, milliseconds * 10**6, 0, milliseconds * 10**6)
    assert C.syscall(223, timer.value, 0, ctypes.byref(times), None) == 0
signal.signal(signal.SIGCONT, lambda *_: None)
"""


async def stay_at_rest(executor: LocalExecutor) -> None:
    """A session that wakes itself again and again is ended, and its memory counts while it rests."""
    executor._backend.groups = None  # type: ignore[union-attr]
    for children, does in ((1, "while True: pass"), (6, "held = b'x' * (30 << 20); time.sleep(60)")):
        # The first thread of a child has ended, so its process looks like a zombie.
        code = f"""
for _ in range({children}):
    if os.fork() == 0:
        def go():
            [wake(milliseconds) for milliseconds in (20, 33, 47)]
            time.sleep(1)
            {does}
        threading.Thread(target=go).start()
        time.sleep(0.1)
        C.syscall(60, 0)
time.sleep(0.3)
"""
        session = await executor.open_session(limits=replace(LIMITS, memory_mb=64))
        assert (await session.run(TIMERS + code)).error is None
        before = cpu = find_cpu(session._pidfd)
        end = time.monotonic() + 20
        while session.alive and time.monotonic() < end:
            with contextlib.suppress(OSError):
                cpu = max(cpu, find_cpu(session._pidfd))
            await asyncio.sleep(0.1)
        with pytest.raises(SandboxFault, match=r"memory_limit|timeout"):
            await session.run("1")
        assert cpu - before < 4


async def take_a_place(executor: LocalExecutor) -> None:
    """A cell takes a place, a session that rests takes none."""
    sessions = [await executor.open_session() for _ in range(4)]
    assert executor._admission.taken == 0
    outcomes = await asyncio.gather(*(session.run(f"{n} * 2") for n, session in enumerate(sessions)))
    assert [outcome.display[0]["text/plain"] for outcome in outcomes] == ["0", "2", "4", "6"]
    assert executor._admission.taken == 0
    running = asyncio.ensure_future(sessions[0].run("import time; time.sleep(30)"))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert executor._admission.taken == 0
    assert (await sessions[0].run("'again'")).display == ({"text/plain": "'again'"},)
    cells = [asyncio.ensure_future(sessions[0].run("import time; time.sleep(0.2)")) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert executor._admission.taken == 1, "those that wait for others of their session hold none"
    await asyncio.gather(*cells)


async def wait_for_a_place(executor: LocalExecutor) -> None:
    """A session whose cell waits is not idle."""
    table = SessionTable(executor, most=4, idle_s=0.5)
    session, _ = await table.open({}, LIMITS)
    for _ in range(2):
        await executor._admission.enter(None)
    cell = asyncio.ensure_future(session.run("1 + 1"))
    await asyncio.sleep(1.2)
    for _ in range(2):
        executor._admission.leave()
    assert (await cell).display == ({"text/plain": "2"},)
    await asyncio.sleep(1.5)
    assert not session.alive, "nobody uses it any more"


@pytest.mark.slow
def test_cells() -> None:
    play(play_cells, keep_files, stop_cells, bound_answers, interrupt_at_once, forget_closed_sessions)


@pytest.mark.slow
def test_limits_and_rest() -> None:
    play(end_at_limits, end_while_the_loop_is_busy, rest_between_cells, take_a_place, max_running=2)
    play(wait_for_a_place, stay_at_rest, forge_answers, max_running=2)


@pytest.mark.slow
def test_a_session_ends_with_its_interpreter_and_with_the_pool() -> None:
    async def kill(executor: LocalExecutor) -> None:
        session, other = await executor.open_session(), await executor.open_session()
        assert session._pidfd is not None
        signal.pidfd_send_signal(session._pidfd, signal.SIGKILL)
        with pytest.raises(SandboxFault) as caught:
            for _ in range(100):
                await session.run("1")
                await asyncio.sleep(0.02)
        assert caught.value.kind is FaultKind.SESSION_ENDED
        await executor.close()
        assert not other.alive

    play(kill)


httpx = pytest.importorskip("httpx", reason="needs the extra 'server'")
pytest.importorskip("fastapi", reason="needs the extra 'server'")

from fastapi import FastAPI  # noqa: E402

from spear_sandbox.client import HttpExecutor  # noqa: E402
from spear_sandbox.service.cells import SessionTable, add_routes  # noqa: E402
from tests.sandbox.service import RunningService, ask, run_local  # noqa: E402


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with run_local(LIMITS, 2, max_sessions=3, session_idle_s=5.0) as running:
        yield running


def test_over_http(service: RunningService) -> None:
    async def go() -> None:
        executor = HttpExecutor(service.url)
        session = await executor.open_session(files={"a b.txt": b"in"}, limits=Limits(wall_s=5.0, memory_mb=128))
        assert (await session.run("x = open('a b.txt').read(); x")).display == ({"text/plain": "'in'"},)
        await session.write_file("ü/n.bin", b"\0\xff")
        assert (
            await session.list_files() == {"a b.txt": 2, "ü/n.bin": 2}
            and await session.read_file("ü/n.bin") == b"\0\xff"
        )
        with pytest.raises(ValueError, match="422"):
            await session.read_file("missing")
        error = (await session.run("1 / 0")).error
        assert error is not None and error.name == "ZeroDivisionError"
        late = await session.run("while True: pass", timeout_s=0.2)
        assert late.status is CellStatus.TIME_LIMIT
        running = asyncio.ensure_future(session.run("import time; time.sleep(20)"))
        await asyncio.sleep(0.3)
        await session.interrupt()
        assert (await running).error is not None
        assert ask(service.url, None, "GET", "/health")[1]["sessions"] == 1
        await session.close()
        await session.close()
        with pytest.raises(SandboxFault) as caught:
            await session.run("1")
        assert caught.value.kind is FaultKind.SESSION_ENDED
        await executor.close()

    asyncio.run(go())


def test_names_bounds_and_idle_sessions(service: RunningService) -> None:
    assert ask(service.url, {"code": "1"}, path=f"/sessions/{'0' * 32}/run")[0] == 410, "as after a new start"
    assert ask(service.url, {"code": "1"}, path="/sessions/mine/run")[0] == 404
    status, content, _ = ask(service.url, {"code": 1}, path=f"/sessions/{'0' * 32}/run")
    assert status == 422 and "code" in content["detail"]
    opened = [ask(service.url, {"idle_timeout": 1}, path="/sessions") for _ in range(4)]
    assert [status for status, _, _ in opened] == [201, 201, 201, 503] and "3 sessions" in opened[-1][1]["detail"]
    name = opened[0][1]["session_id"]
    end = time.monotonic() + 10
    while ask(service.url, None, "GET", f"/sessions/{name}")[0] != 410 and time.monotonic() < end:
        time.sleep(0.1)
    assert ask(service.url, {"code": "1"}, path=f"/sessions/{name}/run")[0] == 410
    while ask(service.url, None, "GET", "/health")[1]["sessions"] and time.monotonic() < end:
        time.sleep(0.1)
    assert ask(service.url, None, "GET", "/health")[1]["sessions"] == 0


def test_notebooks_as_sandbox_fusion_plays_them(service: RunningService) -> None:
    cells = ["a = 'hello'", "a", "import sys; print(a, file=sys.stderr)", "assert False", "open('f', 'w').write(a);"]
    status, content, _ = ask(service.url, {"cells": cells, "fetch_files": ["f", "g"]}, path="/run_jupyter")
    assert (status, content["status"], content["driver"]["return_code"]) == (200, "Success", 0)
    assert content["cells"][1]["display"] == [{"text/plain": "'hello'"}]
    assert content["cells"][2]["stderr"] == "hello\n" and content["cells"][3]["error"][0]["ename"] == "AssertionError"
    assert content["files"] == {"f": base64.b64encode(b"hello").decode()}
    late = {"cells": ["1", "while True: pass", "2"], "total_timeout": 1}
    content = ask(service.url, late, path="/run_jupyter")[1]
    assert content["status"] == "Failed" and content["driver"]["status"] == "TimeLimitExceeded"
    assert len(content["cells"]) == 2
    content = ask(service.url, {"cells": ["import os; os._exit(1)"]}, path="/run_jupyter")[1]
    assert content["status"] == "Failed" and content["driver"]["return_code"] == 1
    assert ask(service.url, {"cells": 1}, path="/run_jupyter")[0] == 422
    for memory in (0, -2):
        for path, body in (("/sessions", {}), ("/run_jupyter", {"cells": []})):
            status, content, _ = ask(service.url, {**body, "memory_limit_MB": memory}, path=path)
            assert status == 422 and "above 0" in str(content)
    assert ask(service.url, {"cells": [], "fetch_files": ["../x"]}, path="/run_jupyter")[0] == 422
    assert ask(service.url, None, "GET", "/health")[1]["sessions"] == 0


def test_notebooks_are_bounded_and_end_with_their_client(service: RunningService) -> None:
    large = "display('x' * (20 << 20))"
    content = ask(service.url, {"cells": [large, large, "1"]}, path="/run_jupyter")[1]
    assert content["status"] == "Failed" and len(content["cells"]) == 2
    assert content["cells"][1]["error"][0]["ename"] == "OutputError"
    files = "for name in 'fgh': open(name, 'wb').write(bytes(9 << 20))"
    content = ask(service.url, {"cells": [files], "fetch_files": ["f", "g", "h"]}, path="/run_jupyter")[1]
    assert set(content["files"]) == {"f", "g"} and "1 files left out" in content["driver"]["stderr"]
    assert ask(service.url, {"cells": ["1"] * 2000}, path="/run_jupyter")[0] == 422
    endless = {"cells": ["import time; time.sleep(60)"], "total_timeout": 1e308}
    with pytest.raises(TimeoutError):
        ask(service.url, endless, path="/run_jupyter", patience=0.5)
    end = time.monotonic() + 3
    while ask(service.url, None, "GET", "/health")[1]["sessions"] and time.monotonic() < end:
        time.sleep(0.05)
    assert ask(service.url, None, "GET", "/health")[1]["running"] == 0


def test_one_session_cannot_keep_others_out(service: RunningService) -> None:
    """Neither its waiting cells nor its files nor what it writes to the pool."""

    async def go() -> None:
        executor = HttpExecutor(service.url)
        session = await executor.open_session()
        await session.run("open('a\\nb', 'w').write('in'); open('large', 'wb').write(bytes(13 << 20))")
        assert await session.read_file("a\nb") == b"in"
        with pytest.raises(ValueError, match="12 MiB"):
            await session.read_file("large")
        cells = [asyncio.ensure_future(session.run("import time; time.sleep(0.5)")) for _ in range(6)]
        await asyncio.sleep(0.2)
        assert (await executor.run("print(1)")).stdout == "1\n"
        assert not all(cell.done() for cell in cells)
        await asyncio.gather(*cells)
        others = [await executor.open_session() for _ in range(2)]
        flood = f"{FIND_SOCKET}\nwhile True: send(bytes(1 << 16))"
        floods = [asyncio.ensure_future(other.run(flood)) for other in others]
        worst = 0.0
        for _ in range(50):
            started = time.monotonic()
            await asyncio.to_thread(ask, service.url, None, "GET", "/v1/ping")
            worst = max(worst, time.monotonic() - started)
        assert worst < 1 and {(await ended).status for ended in floods} == {CellStatus.ENDED}
        await session.close()
        await executor.close()

    asyncio.run(go())


def test_sessions_want_the_token() -> None:
    with run_local(LIMITS, 1, token="s3cret") as running:
        for method, path in (
            ("POST", "/sessions"),
            ("POST", "/run_jupyter"),
            ("POST", f"/sessions/{'0' * 32}/run"),
            ("GET", f"/sessions/{'0' * 32}/files"),
            ("PUT", f"/sessions/{'0' * 32}/files/x"),
            ("DELETE", f"/sessions/{'0' * 32}"),
        ):
            assert ask(running.url, b"{}", method, path)[0] == 401, path


@pytest.mark.parametrize("kind", [FaultKind.UNAVAILABLE, FaultKind.SESSION_ENDED])
def test_a_notebook_that_meets_a_fault_is_answered_as_sandbox_fusion_does(kind: FaultKind) -> None:
    class Service:
        async def play_notebook(self, body: bytes) -> Any:
            raise SandboxFault(kind, "the interpreter has died")

    async def ask_for_body(request: Any) -> bytes:
        return await request.body()

    async def go() -> Any:
        app = FastAPI()
        add_routes(app, Service, ask_for_body)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
            return await client.post("/run_jupyter", json={"cells": ["1"]})

    answer = asyncio.run(go())
    assert answer.status_code == 200 and answer.json()["status"] == "SandboxError"
