"""Warm interpreters, their packages, and languages beside Python."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.guest.zygote import FAILED, SPAWNED, STARVED
from spear_sandbox.installation import Installation, find_installation, list_kinds
from spear_sandbox.pool import backends as warm
from spear_sandbox.pool.backends import WarmBackend
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.pool.zygotes import Zygote
from spear_sandbox.protocol import FaultKind, SandboxFault
from tests.sandbox.service import list_children

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("print(1)", 0), ("import numpy as np", 1), ("from sympy import *", 1), ("x = 'import mpmath'", 1),
        ("numpyish = 1", 0), ("import numpy, scipy.stats", 2), ("f = sympy.lambdify(x, y)", 2), ("import pandas", 1),
    ],
)  # fmt: skip
def test_kind_by_the_words_of_a_program(code: str, kind: int) -> None:
    kinds = list_kinds(["numpy", "sympy", "mpmath", "scipy", "pandas"])
    assert Installation("python", "/usr", "guest", {}, {}, kinds).choose_kind(code) == kind


def test_installation_is_outside_of_virtual_environments() -> None:
    found = find_installation(("numpy", "no_such_package"))
    assert os.path.exists(found.interpreter) and found.prefix == os.path.realpath(sys.base_prefix)
    assert "no_such_package" not in found.packages
    assert all(os.path.exists(path) for path in found.packages.values())


def play(test: Callable[[LocalExecutor], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        executor = LocalExecutor("namespaces", max_running=4, **options)
        await executor.start()
        try:
            await test(executor)
        finally:
            await executor.close()

    asyncio.run(run())


def backend_of(executor: LocalExecutor) -> WarmBackend:
    assert isinstance(executor._backend, WarmBackend)
    return executor._backend


def test_dead_interpreters_are_waited_for(pool: BlockingExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(executor: LocalExecutor) -> None:
        def kill_all() -> list[Zygote]:
            found = [slot.zygote for slot in backend_of(executor)._slots if slot.zygote is not None]
            for zygote in found:
                for child in list_children(zygote.pid):
                    os.kill(child, signal.SIGKILL)
            return found

        run = asyncio.ensure_future(executor.run("import time; time.sleep(0.5); print(1)"))
        await asyncio.sleep(0.2)
        dead = kill_all()
        assert (await executor.run("print(2)")).stdout == "2\n", "none is alive: it waits for one"
        assert (await run).stdout == "1\n", "it was lost, and is started again"
        assert executor.health().restarts >= 1 and executor.health().ok
        assert backend_of(executor)._slots[0].zygote not in dead
        monkeypatch.setattr("spear_sandbox.pool.local.LOST_WITHIN_S", 0.1)
        run = asyncio.ensure_future(executor.run("while True: pass"))
        await asyncio.sleep(0.3)
        kill_all()
        with pytest.raises(SandboxFault):  # its caller has waited for long enough
            await run

    play(test)


@pytest.mark.slow
def test_worn_out_interpreter_is_replaced_without_a_fault(
    pool: BlockingExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "RUNS_OF_ONE", 20)

    async def test(executor: LocalExecutor) -> None:
        slot = backend_of(executor)._slots[0]
        first = slot.zygote
        assert first is not None
        slow = asyncio.ensure_future(executor.run("import time; time.sleep(2); print('slow')"))
        for _ in range(10):
            outcomes = await asyncio.gather(*(executor.run("print(1)") for _ in range(8)))
            assert {outcome.stdout for outcome in outcomes} == {"1\n"}
            await asyncio.sleep(0.05)
        assert (await slow).stdout == "slow\n", "it ends in the interpreter that it began in"
        await asyncio.wait_for(first.ended, 10)
        assert slot.zygote is not first and executor.health().restarts == 0

    play(test)


ORPHANED = """
import asyncio, os, sys
from spear_sandbox.pool.local import LocalExecutor
async def main():
    executor = LocalExecutor("namespaces")
    await executor.start()
    run = asyncio.ensure_future(executor.run("while True: pass"))
    await asyncio.sleep(1)  # until it runs
    if os.fork() == 0:
        # Holds a copy of every socket and pipe of the pool.
        import time
        time.sleep(20)
        os._exit(0)
    print("ready", flush=True)
    await run
asyncio.run(main())
"""


def test_nothing_survives_the_pools_process(pool: BlockingExecutor) -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHANED], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    forked = [child for child in list_children(process.pid) if not list_children(child)]
    launchers = [child for child in list_children(process.pid) if list_children(child)]
    zygotes = [child for launcher in launchers for child in list_children(launcher)]
    runs = [child for zygote in zygotes for child in list_children(zygote)]
    assert launchers and zygotes and runs
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 5
    family = [*launchers, *zygotes, *runs]
    while (left := [pid for pid in family if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in forked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


ADOPTING = """
import asyncio, os
from spear_sandbox.guest.kernel import become_subreaper
from spear_sandbox.pool.local import LocalExecutor
async def main():
    executor = LocalExecutor("namespaces")
    await executor.start()
    while executor.health().zygotes < len(executor._backend._slots):  # one that is just starting is killed
        await asyncio.sleep(0.05)
    await executor.close()
become_subreaper()
asyncio.run(main())
try:
    print(os.waitid(os.P_ALL, 0, os.WEXITED))
except ChildProcessError:
    print("none")
"""


@pytest.mark.slow
def test_no_dead_process_is_left_to_process_1(pool: BlockingExecutor) -> None:
    """That of a container may be the service itself, which knows nothing of them."""
    done = subprocess.run(
        [sys.executable, "-c", ADOPTING], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "none\n", done


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_run_that_is_cancelled_as_it_starts_is_killed() -> None:
    async def cancel() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # The warm interpreter is this test; the run is a process that would sleep.
        warm_one = subprocess.Popen(["sleep", "0"])
        run = subprocess.Popen(["sleep", "60"])
        zygote = Zygote(warm_one, ours, traits=b"")
        asked = asyncio.ensure_future(zygote.fork([]))
        await asyncio.sleep(0)
        pidfd = os.pidfd_open(run.pid)
        socket.send_fds(theirs, [SPAWNED], [pidfd])
        os.close(pidfd)
        asyncio.get_running_loop().call_soon(asked.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            os.close(await asked)
        assert asked.cancelled()
        try:
            assert await asyncio.to_thread(run.wait, 5) == -signal.SIGKILL
        finally:
            run.kill()
            theirs.close()
            await zygote.close()

    asyncio.run(cancel())


@pytest.mark.parametrize(("answer", "kind"), [(STARVED, FaultKind.MEMORY), (FAILED, FaultKind.UNAVAILABLE)])
def test_a_run_that_the_kernel_refuses_for_lack_of_memory_may_be_tried_again(answer: bytes, kind: FaultKind) -> None:
    async def ask() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        zygote = Zygote(subprocess.Popen(["sleep", "0"]), ours, traits=b"")
        asked = asyncio.ensure_future(zygote.fork([]))
        await asyncio.sleep(0)
        theirs.sendall(answer + b"[Errno 12] clone: Cannot allocate memory")
        with pytest.raises(SandboxFault, match=r"\[Errno 12\] clone") as caught:
            await asked
        assert caught.value.kind is kind
        theirs.close()
        await zygote.close()

    asyncio.run(ask())


def test_a_run_for_which_this_process_has_no_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def starve(executor: LocalExecutor) -> None:
        backend, failures = backend_of(executor), [OSError(errno.ENOMEM, "fork")]
        borrow = backend.borrow

        def borrow_late(code: str) -> contextlib.AbstractAsyncContextManager[Any]:
            if failures:
                raise failures.pop()
            return borrow(code)

        monkeypatch.setattr(backend, "borrow", borrow_late)
        assert (await executor.run("print(1)")).stdout == "1\n"
        failures += [OSError(errno.ENOMEM, "fork"), OSError(errno.ENOMEM, "fork")]
        with pytest.raises(SandboxFault, match="no memory to start the run") as caught:
            await executor.run("print(2)")
        assert caught.value.kind is FaultKind.MEMORY and not failures

    play(starve)
