"""Runs beside others: descriptors, locks, and what a few hundred runs leave."""

import asyncio
import contextlib
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.runner.figures import find_bar
from benchmarks.sandbox import BARS, measure_leaks
from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.pool.backends import WarmBackend
from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor
from spear_sandbox.protocol import FaultKind, SandboxFault

ORPHANS = """
import os
codes = [os.system("(true &)") for _ in range(300)]
print(sum(code != 0 for code in codes), len([name for name in os.listdir("/proc") if name.isdigit()]) < 20)
"""
SENDER = """
import os, socket, time
descriptors = ([os.open("/dev/null", os.O_RDONLY) for _ in range(60)] * 5)[:253]
for _ in range(8):
    if os.fork() == 0:
        break
left, right = socket.socketpair()
left.setblocking(False)
right.setblocking(False)
end = time.monotonic() + 1.5
sent = 0
while time.monotonic() < end:
    try:
        socket.send_fds(left, [b"x"], descriptors)
        sent += 1
    except OSError:
        try:
            right.recv(1)
        except OSError:
            pass
print(sent)
"""


def test_orphans_that_ended_do_not_count(pool: BlockingExecutor) -> None:
    assert pool.run(ORPHANS).stdout == "0 True\n"


def test_the_program_is_not_woken_for_by_its_own_signals(pool: BlockingExecutor) -> None:
    """Signals to the supervisor only let it look for ended processes."""
    code = "import os, signal\nfor _ in range(100_000): os.kill(1, signal.SIGCHLD)\nprint('done')"
    assert pool.run(code).stdout == "done\n"


def test_descriptors_under_way_do_not_end_the_interpreter(pool: BlockingExecutor) -> None:
    """They count by user; a sandbox that is started with few descriptors would soon be refused its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))  # by the tests before this one
    resource.setrlimit(resource.RLIMIT_NOFILE, (400 + opened, hard))
    few = BlockingExecutor(lambda: LocalExecutor("namespaces", max_running=4, zygotes=1))
    try:
        assert few.run("print(1)").stdout == "1\n"
        with ThreadPoolExecutor(3) as threads:
            senders = [threads.submit(few.run, SENDER) for _ in range(3)]
            time.sleep(0.5)
            outcomes = [few.run("print(1)").stdout for _ in range(8)]
            assert all(sender.result().stdout.strip() for sender in senders)
        assert outcomes == ["1\n"] * 8
    finally:
        few.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_whose_descriptor_is_lost_gives_its_place_back() -> None:
    async def go() -> None:
        executor = LocalExecutor("namespaces", max_running=2, zygotes=1)
        try:
            await executor.start()
        except IsolationRefusedError as error:
            pytest.skip(f"no namespaces here: {error}")
        try:
            for _ in range(3):
                await lose_a_descriptor(executor)
            assert (await asyncio.wait_for(executor.run("print(3)"), 20)).stdout == "3\n"
        finally:
            await executor.close()

    async def lose_a_descriptor(executor: LocalExecutor) -> None:
        backend = executor._backend
        assert isinstance(backend, WarmBackend)
        run = asyncio.ensure_future(executor.run("print(2)"))
        while not any(slot.zygote is not None and slot.zygote._waiting for slot in backend._slots):
            await asyncio.sleep(0)
        # Other parts of the process take all descriptors just now.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        last = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
        held = [last]
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(SandboxFault) as caught:
                await asyncio.wait_for(run, 20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        assert caught.value.kind is FaultKind.UNAVAILABLE and "too many open files" in str(caught.value)

    asyncio.run(go())


OWN_FILES = """
import fcntl, os, sqlite3, subprocess, threading, time

os.mkfifo("pipe")
if os.fork() == 0:
    with open("pipe", "w") as end:
        end.write("through the pipe")
    os._exit(0)
print(open("pipe").read())

with open("own", "w") as first, open("own") as second:
    fcntl.flock(first, fcntl.LOCK_EX)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held")
    if os.fork() == 0:
        time.sleep(0.1)
        fcntl.flock(first, fcntl.LOCK_UN)
        os._exit(0)
    fcntl.flock(second, fcntl.LOCK_EX)  # waits
    print("got")

data = sqlite3.connect("data.db")
data.execute("create table t (x)")
data.execute("insert into t values (42)")
data.commit()
print(sqlite3.connect("data.db").execute("select x from t").fetchone())
done = subprocess.run(["flock", "-n", "own", "echo", "locked by a command"], capture_output=True, text=True)
print(done.stdout.strip() or done.stderr)

thread = threading.Thread(target=time.sleep, args=(0.3,))
thread.start()
with open("own") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        print(error.errno == 37)
thread.join()
try:
    fcntl.flock(99, fcntl.LOCK_SH)
except OSError as error:
    print(error.strerror)
"""


def test_locks_and_pipes_in_the_working_folder(pool: BlockingExecutor) -> None:
    outcome = pool.run(OWN_FILES)
    lines = ["through the pipe", "held", "got", "(42,)", "locked by a command", "True", "Bad file descriptor"]
    assert outcome.stdout.splitlines() == lines, outcome.stderr


def test_asking_the_supervisor_much_does_not_keep_it_from_its_work(pool: BlockingExecutor) -> None:
    code = """
import fcntl, os
file = open("own", "w")
for _ in range(3):
    if os.fork() == 0: break
held = []
while True:
    for _ in range(50): fcntl.flock(file, fcntl.LOCK_SH)
    held.append(bytearray(b"x" * (1 << 20)))
"""
    from spear_sandbox.protocol import KillReason, Limits

    assert pool.run(code, limits=Limits(memory_mb=64, wall_s=15.0)).reason is KillReason.MEMORY


async def play(runs: int) -> list[str]:
    executor = LocalExecutor("namespaces", max_running=6)
    await executor.start()
    try:
        bars = [bar for bar in BARS if bar.at_most is not None]
        pairs = [(figure, find_bar(figure, bars)) for figure in await measure_leaks(executor, runs)]
        assert sum(bar is not None for _, bar in pairs) == 6
        return [f"{figure.name}: {figure.value}" for figure, bar in pairs if bar and not bar.holds(figure.value)]
    finally:
        await executor.close()


@pytest.mark.slow
def test_a_few_hundred_runs(pool: BlockingExecutor) -> None:
    assert asyncio.run(play(300)) == []


@pytest.mark.nightly
def test_ten_thousand_runs(pool: BlockingExecutor) -> None:
    assert asyncio.run(play(10_000)) == []
