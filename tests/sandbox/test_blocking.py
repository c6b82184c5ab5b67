"""Executors for threads: one loop, many callers, forks, and the end of the process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spear_sandbox.blocking import BlockingExecutor, open_executor
from spear_sandbox.protocol import FaultKind, Isolation, Limits, Outcome, RunStatus, SandboxFault

ROOT = Path(__file__).resolve().parents[2]


class EchoExecutor:
    """Answers with the program itself, after a while; says on which loop it lives."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.loop = asyncio.get_running_loop()
        self.closed = False

    async def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        assert asyncio.get_running_loop() is self.loop
        if code == "fault":
            raise SandboxFault(FaultKind.TIMEOUT, "no place")
        await asyncio.sleep(0.05)
        return Outcome(RunStatus.FINISHED, 0, code, "", 0.05, 0.0, 0, 0.0, len(code), 0, False, Isolation.NONE)

    async def close(self) -> None:
        self.closed = True


def test_threads_share_one_executor() -> None:
    EchoExecutor.made = 0
    executor = BlockingExecutor(EchoExecutor)
    start = time.monotonic()
    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda number: executor.run(str(number)).stdout, range(128)))
    assert answers == [str(number) for number in range(128)]
    assert EchoExecutor.made == 1
    assert time.monotonic() - start < 3, "they wait at the same time"
    executor.close()
    with pytest.raises(SandboxFault, match="closed") as caught:
        executor.run("late")
    assert caught.value.kind is FaultKind.UNAVAILABLE
    executor.close()


def test_faults_come_through() -> None:
    executor = BlockingExecutor(EchoExecutor)
    with pytest.raises(SandboxFault, match="no place"):
        executor.run("fault")
    assert executor.run("x").stdout == "x"
    executor.close()


def test_forked_child_starts_its_own() -> None:
    executor = BlockingExecutor(EchoExecutor)
    assert executor.run("parent").stdout == "parent"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answers: list[str] = []
            threads = [threading.Thread(target=lambda: answers.append(executor.run("child").stdout)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            code = 0 if answers == ["child"] * 4 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert executor.run("parent").stdout == "parent"
    executor.close()


def test_open_executor_gives_the_same_one() -> None:
    assert open_executor() is open_executor(None)
    assert open_executor("http://127.0.0.1:9") is open_executor("http://127.0.0.1:9")
    assert open_executor() is not open_executor("http://127.0.0.1:9")


LEAVING = """
import sys
from spear_sandbox.blocking import open_executor
print(open_executor().run("print(6 * 7)").stdout, end="")
"""


def test_process_that_just_ends_leaves_nothing(pool: BlockingExecutor) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


FORKING = """
import os
from spear_sandbox.blocking import open_executor
executor = open_executor()
print(executor.run("print('parent')").stdout, end="", flush=True)
child = os.fork()
if child == 0:
    print(executor.run("print('child')").stdout, end="", flush=True)
    executor.close()
    os._exit(0)
os.waitpid(child, 0)
print(executor.run("print('parent again')").stdout, end="", flush=True)
"""


def test_pool_and_fork(pool: BlockingExecutor) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["parent", "child", "parent again"], done.stderr
