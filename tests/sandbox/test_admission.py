"""Places in a queue, and the blocking client."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spear_sandbox.blocking import BlockingExecutor, open_executor
from spear_sandbox.pool.admission import Admission, NoPlaceError, QueueFullError
from spear_sandbox.protocol import FaultKind, Isolation, Limits, Outcome, RunStatus, SandboxFault


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_places_are_given_in_order_of_arrival() -> None:
    async def play() -> None:
        admission = Admission(2, 10)
        entered: list[int] = []

        async def come(number: int) -> None:
            await admission.enter(10)
            entered.append(number)

        tasks = [asyncio.ensure_future(come(number)) for number in range(5)]
        await settle()
        assert (entered, admission.queued, admission.taken) == ([0, 1], 3, 2)
        for left in range(1, 4):
            admission.leave()
            await settle()
            assert entered == list(range(2 + left))
        for _ in range(2):
            admission.leave()
        assert (admission.queued, admission.taken) == (0, 0)
        await asyncio.gather(*tasks)

    asyncio.run(play())


def test_who_has_waited_long_enough_is_turned_away_and_holds_no_place() -> None:
    async def play() -> None:
        admission = Admission(1, 10)
        await admission.enter(0)
        with pytest.raises(NoPlaceError, match=r"0\.02 s"):
            await admission.enter(0.02)
        assert (admission.queued, admission.taken) == (0, 1)
        admission.leave()
        await admission.enter(0)
        assert admission.taken == 1

    asyncio.run(play())


def test_a_full_queue_turns_away_at_once() -> None:
    async def play() -> None:
        admission = Admission(1, 1)
        await admission.enter(0)
        waiting = asyncio.ensure_future(admission.enter(5))
        await settle()
        with pytest.raises(QueueFullError, match="1 others"):
            await asyncio.wait_for(admission.enter(100), 1)
        admission.leave()
        await waiting
        assert (admission.queued, admission.taken) == (0, 1)

    asyncio.run(play())


def test_whose_turn_comes_too_late_is_turned_away_as_soon_as_that_is_known() -> None:
    async def play() -> None:
        admission = Admission(1, 1000)
        await admission.enter(0)
        patient = asyncio.ensure_future(admission.enter(60))
        waiting = [asyncio.ensure_future(admission.enter(1.0)) for _ in range(300)]
        patient_too = asyncio.ensure_future(admission.enter(60))
        for _ in range(20):  # 0.01 s for each: some 80 of them fit into a second
            await asyncio.sleep(0.01)
            admission.leave()
        assert patient.done() and not patient_too.done(), "who may wait for longer keeps others waiting"
        patient_too.cancel()
        await settle()
        admission.leave()
        await settle()
        away = [turn for turn in waiting if turn.done() and turn.exception()]
        assert 150 < len(away) < 300 and away == waiting[-len(away) :]
        error = away[-1].exception()
        assert isinstance(error, QueueFullError) and 1.0 < error.retry_s < 10, error
        with pytest.raises(QueueFullError):
            await asyncio.wait_for(admission.enter(0.1), 0.05)
        while admission.queued:
            admission.leave()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(play())


def test_no_place_is_lost_whoever_gives_up_when() -> None:
    async def play() -> None:
        rng = random.Random(7)
        admission = Admission(3, 5)
        most = 0

        async def come() -> None:
            nonlocal most
            try:
                await admission.enter(rng.choice([0.0, 0.001, 0.01, 1.0]))
            except NoPlaceError:
                return
            try:
                most = max(most, admission.taken)
                await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
            finally:
                admission.leave()

        tasks = []
        for _ in range(400):
            task = asyncio.ensure_future(come())
            tasks.append(task)
            if rng.random() < 0.3:
                asyncio.get_running_loop().call_later(rng.random() / 200, task.cancel)
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (admission.taken, admission.queued, most) == (0, 0, 3)

    asyncio.run(play())


def test_a_place_that_comes_while_its_caller_is_cancelled_goes_to_the_next() -> None:
    async def play() -> None:
        admission = Admission(1, 10)
        await admission.enter(0)
        first = asyncio.ensure_future(admission.enter(5))
        second = asyncio.ensure_future(admission.enter(5))
        await settle()
        admission.leave()  # first's turn has come, but it has not run yet
        first.cancel()
        await second
        assert first.cancelled() and (admission.taken, admission.queued) == (1, 0)

    asyncio.run(play())


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
    assert time.monotonic() - start < 5, "one after the other they wait for 6.4 s"
    executor.close()
    with pytest.raises(SandboxFault, match="closed") as caught:
        executor.run("late")
    assert caught.value.kind is FaultKind.UNAVAILABLE
    executor.close()


class WaitingExecutor(EchoExecutor):
    """Waits for another try, as a client does."""

    async def run(self, code: str, **_: Any) -> Outcome:
        await asyncio.sleep(60)
        raise AssertionError


def test_closing_keeps_no_caller_waiting() -> None:
    executor = BlockingExecutor(WaitingExecutor)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(executor.run, "pass")
        time.sleep(0.2)
        executor.close()
        with pytest.raises(SandboxFault, match="closed") as caught:
            call.result(5)
    assert caught.value.kind is FaultKind.UNAVAILABLE


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
