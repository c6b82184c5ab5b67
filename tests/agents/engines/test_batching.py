from __future__ import annotations

import asyncio
import random

import pytest

from spear_agents.engines.base import Finish, Generation, Request, Sampling
from spear_agents.engines.batching import MicroBatcher

FOREVER = 3600.0


class Recorder:
    """Answers each request with its own prompt and remembers the batches."""

    def __init__(self, delay: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self.delay = delay

    async def __call__(self, requests: list[Request]) -> list[Generation]:
        self.batches.append([request.request_id for request in requests])
        await asyncio.sleep(self.delay)
        if any(request.prompt_ids == (666,) for request in requests):
            raise ZeroDivisionError("a bad batch")
        return [Generation(tuple(request.prompt_ids), (0.0,), Finish.STOP) for request in requests]


async def ask(engine: MicroBatcher, name: str, *prompt: int) -> Generation:
    return await engine.generate(prompt or (1,), Sampling(), request_id=name)


def test_a_batch_goes_at_once_when_every_announced_caller_waits() -> None:
    recorder = Recorder()
    engine = MicroBatcher(recorder, max_wait_s=FOREVER)

    async def play(name: str, turns: int) -> None:
        with engine.session():
            for turn in range(turns):
                answer = await ask(engine, f"{name}{turn}", turn)
                assert answer.token_ids == (turn,)

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(play("a", 3), play("b", 1), play("c", 2)), 5)

    asyncio.run(main())
    assert recorder.batches == [["a0", "b0", "c0"], ["a1", "c1"], ["a2"]]
    assert engine.live == 0


def test_without_sessions_the_timer_and_the_full_batch_send() -> None:
    recorder = Recorder()

    async def main() -> None:
        engine = MicroBatcher(recorder, max_batch=2, max_wait_s=0.01)
        await asyncio.wait_for(asyncio.gather(*(ask(engine, str(i)) for i in range(5))), 5)
        await asyncio.wait_for(ask(engine, "late"), 5)

    asyncio.run(main())
    assert recorder.batches == [["0", "1"], ["2", "3"], ["4"], ["late"]]


def test_a_caller_that_does_something_else_is_waited_for_no_longer_than_the_timer() -> None:
    recorder = Recorder()

    async def main() -> None:
        engine = MicroBatcher(recorder, max_wait_s=0.01)
        with engine.session(), engine.session():
            await asyncio.wait_for(ask(engine, "quick"), 5)

    asyncio.run(main())
    assert recorder.batches == [["quick"]]


@pytest.mark.parametrize("trial", range(4))
def test_deterministic_batches_do_not_depend_on_timing(trial: int) -> None:
    recorder = Recorder(delay=0.001)
    dice = random.Random(trial)

    async def main() -> None:
        engine = MicroBatcher(recorder, max_batch=3, max_wait_s=0.0, deterministic=True)

        async def play(name: str, turns: int) -> None:
            with engine.session():
                for turn in range(turns):
                    await asyncio.sleep(dice.random() / 200)
                    await ask(engine, f"{name}{turn}")

        names = ["d", "b", "a", "c"]
        dice.shuffle(names)
        await asyncio.wait_for(asyncio.gather(*(play(name, 1 + "abcd".index(name)) for name in names)), 10)

    asyncio.run(main())
    assert recorder.batches == [["a0", "b0", "c0"], ["d0"], ["b1", "c1", "d1"], ["c2", "d2"], ["d3"]]


def test_a_failing_batch_gives_its_callers_the_error_and_the_batcher_lives_on() -> None:
    recorder = Recorder()

    async def main() -> list[object]:
        engine = MicroBatcher(recorder, max_wait_s=0.0)
        failed = await asyncio.gather(ask(engine, "a", 666), ask(engine, "b"), return_exceptions=True)
        return [*failed, await ask(engine, "c", 7)]

    first, second, third = asyncio.run(main())
    assert isinstance(first, ZeroDivisionError) and isinstance(second, ZeroDivisionError)
    assert isinstance(third, Generation) and third.token_ids == (7,)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cancelled_caller_is_not_waited_for(deterministic: bool) -> None:
    recorder = Recorder()

    async def main() -> None:
        engine = MicroBatcher(recorder, max_wait_s=FOREVER, deterministic=deterministic)

        async def play(name: str, sleep: float) -> None:
            with engine.session():
                await asyncio.sleep(sleep)
                await ask(engine, name)

        leaver, stayer = asyncio.create_task(play("leaver", 0)), asyncio.create_task(play("stayer", 0.02))
        await asyncio.sleep(0.01)
        leaver.cancel()
        await asyncio.wait_for(stayer, 5)
        assert leaver.cancelled()

    asyncio.run(main())
    assert recorder.batches == [["stayer"]]
