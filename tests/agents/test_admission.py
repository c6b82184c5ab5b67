"""Conversations with an engine whose cache is too small for all of them."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spear_agents.engines.base import Finish, Generation, Sampling
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.prompting import PromptBuilder
from spear_agents.rollout import CacheGate, Job, play_many
from spear_agents.trajectory import Layout
from spear_agents.usage import sum_usage
from tests.agents.corridor import CorridorEnv

GROWTH = 50


class LeastRecentlyUsed:
    """An engine that remembers contexts up to a number of tokens, and says how much of each prompt it remembered."""

    def __init__(self, room: int, cache_tokens: int | None = None) -> None:
        self.room = room
        self.cache_tokens = cache_tokens
        self.kept: OrderedDict[str, int] = OrderedDict()
        self.live: dict[str, int] = {}
        self.most = 0
        self.asked = self.found = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        name = request_id.rpartition("#")[0]
        found = min(self.kept.pop(name, 0), len(prompt_ids))
        self.asked, self.found = self.asked + len(prompt_ids), self.found + found
        ids = (*ByteTokenizer().encode(CorridorEnv.templates["compact"].respond("go")), 256)
        self.kept[name] = len(prompt_ids) + len(ids)
        while sum(self.kept.values()) > self.room:
            self.kept.popitem(last=False)
        await asyncio.sleep(0)
        return Generation(ids, (0.0,) * len(ids), Finish.STOP, cached_tokens=found)


async def talk(gate: CacheGate, engine: Any, name: str, turns: int) -> None:
    with gate.admit(engine) as seat:
        for turn in range(1, turns + 1):
            await seat.generate((0,) * (GROWTH * turn), Sampling(), request_id=f"{name}#{turn}")


def play(engine: LeastRecentlyUsed, gate: CacheGate, conversations: int, places: int, turns: int = 20) -> None:
    async def fill(names: list[str]) -> None:
        dice = random.Random(names[-1])
        while names:
            await talk(gate, engine, names.pop(), dice.randint(turns // 2, turns))

    async def run() -> None:
        names = [str(number) for number in range(conversations)]
        await asyncio.gather(*(fill(names) for _ in range(places)))

    asyncio.run(run())


def test_what_fits_is_read_once() -> None:
    """32 conversations of 1,000 tokens at a time, room for ten."""
    open_to_all, gated = LeastRecentlyUsed(10_000), LeastRecentlyUsed(10_000)
    play(open_to_all, CacheGate(10**9), 96, 32)
    play(gated, CacheGate(10_000), 96, 32)
    shares = [engine.found / engine.asked for engine in (open_to_all, gated)]
    assert shares[0] < 0.5 and shares[1] > 0.85


@pytest.mark.parametrize("capacity", [1, 60, 1000])
def test_a_conversation_that_no_cache_holds_is_played_all_the_same(capacity: int) -> None:
    engine = LeastRecentlyUsed(10_000)
    gate = CacheGate(capacity)
    play(engine, gate, 12, 5)
    assert not gate._contexts and not gate._waiting


def test_a_conversation_that_is_given_up_leaves_its_place() -> None:
    async def run() -> list[str]:
        engine, gate, done = LeastRecentlyUsed(1000), CacheGate(100), []

        async def one(name: str, turns: int) -> None:
            await talk(gate, engine, name, turns)
            done.append(name)

        tasks = [asyncio.create_task(one(name, turns)) for name, turns in (("a", 10**6), ("b", 3), ("c", 3))]
        for _ in range(50):
            await asyncio.sleep(0)
        assert done == [], "the oldest fills the cache alone"
        tasks[1].cancel()  # while it waits
        await asyncio.sleep(0)
        tasks[0].cancel()  # while it is answered
        await asyncio.wait_for(tasks[2], 10)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not gate._contexts and not gate._waiting
        return done

    assert asyncio.run(run()) == ["c"]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("capacity", [None, 1])
def test_episodes_wait_where_the_engine_says_what_its_cache_holds(layout: Layout, capacity: int | None) -> None:
    class Watched(LeastRecentlyUsed):
        async def generate(self, *args: Any, request_id: str, **options: Any) -> Generation:
            self.live[request_id] = 1
            self.most = max(self.most, len(self.live))
            try:
                return await super().generate(*args, request_id=request_id, **options)
            finally:
                del self.live[request_id]

    engine = Watched(10**9, capacity)
    jobs = [Job(f"corridor/test/{i % 3:03d}", i) for i in range(10)]
    trajectories = asyncio.run(
        play_many(
            jobs,
            make_env=CorridorEnv,
            engine_for=lambda env: engine,
            prompts=PromptBuilder(ByteTokenizer(), CorridorEnv.templates["compact"], layout),
            sampling=Sampling(),
            env_id="corridor",
            concurrency=5,
        )
    )
    assert [(t.task_id, t.seed) for t in trajectories] == [(job.task_id, job.seed) for job in jobs]
    assert engine.most == (1 if capacity and layout is Layout.CONVERSATION else 5)
    assert sum_usage(trajectories).cached_tokens == engine.found
