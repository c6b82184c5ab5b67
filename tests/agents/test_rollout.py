from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spear_agents.engines.base import ByteTokenizer, Finish, Generation, Request, Sampling
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine
from spear_agents.engines.tensors import MicroBatcher
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.rollout import Job, Retrying, play_many
from spear_agents.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError
from tests.agents.corridor import CorridorEnv

TEMPLATE = CorridorEnv.templates["compact"]
JOBS = [Job(f"corridor/test/{i % 3:03d}", i) for i in range(10)]


class Counted(CorridorEnv):
    """Counts how many are open."""

    opened: list[Counted] = []  # noqa: RUF012
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.opened.append(self)

    def close(self) -> None:
        type(self).closed += 1


async def walk(requests: list[Request]) -> list[Generation]:
    ids = (*ByteTokenizer().encode(TEMPLATE.respond("go")), 256)
    return [Generation(ids, (0.0,) * len(ids), Finish.STOP) for _ in requests]


def play(engine_for: Any, jobs: Sequence[Job] = JOBS, **options: Any) -> list[Trajectory]:
    return asyncio.run(
        play_many(
            jobs,
            engine_for=engine_for,
            prompts=PromptBuilder(ByteTokenizer(), TEMPLATE),
            sampling=Sampling(),
            env_id="corridor",
            **({"make_env": CorridorEnv, "concurrency": 4} | options),
        )
    )


@pytest.mark.parametrize(("tries", "faults"), [(1, 10), (2, 10), (3, 0)])
def test_faults_are_played_again_with_the_same_seed(tries: int, faults: int) -> None:
    seeds: list[int] = []

    async def play_third(env: Any, engine: Any, prompts: Any, **job: Any) -> Trajectory:
        seeds.append(job["seed"])
        played = await play_episode(env, engine, prompts, **job)
        broken = seeds.count(job["seed"]) < 3
        return replace(played, stop=StopReason.FAULT, fault="down") if broken else played

    retrying = Retrying(play_third, tries, wait_s=0.0)
    played = play(lambda env: ScriptedEngine(lambda *_: TEMPLATE.respond("go")), play=retrying)
    assert sum(one.stop is StopReason.FAULT for one in played) == faults
    assert sorted(seeds) == sorted(tries * [job.seed for job in JOBS])
    assert retrying.retried == 10 * (tries - 1)
    assert retrying.discarded == (tries - 1) * sum(len(one.turns) for one in played)


def test_results_come_in_the_order_of_the_jobs_and_callbacks_in_that_of_the_ends() -> None:
    ended: list[Trajectory] = []
    engine = MicroBatcher(walk, max_wait_s=3600)
    trajectories = play(lambda env: engine, on_done=ended.append)
    assert [(t.task_id, t.seed) for t in trajectories] == [(job.task_id, job.seed) for job in JOBS]
    assert sorted(ended, key=lambda t: t.seed) == trajectories
    # The shortest corridor ends first although it shares its batches.
    assert [t.seed for t in ended[:2]] == [0, 3]
    assert all(t.won for t in trajectories)
    assert engine.live == 0


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_batches_are_full_and_the_number_of_places_does_not_matter(concurrency: int) -> None:
    sizes: list[int] = []

    async def watched(requests: list[Request]) -> list[Generation]:
        sizes.append(len(requests))
        return await walk(requests)

    engine = MicroBatcher(watched, max_wait_s=3600, deterministic=True)
    trajectories = play(lambda env: engine, concurrency=concurrency)
    assert trajectories == play(lambda env: ScriptedEngine(lambda prompt, dice: TEMPLATE.respond("go")))
    assert sum(sizes) == sum(len(t.turns) for t in trajectories)
    assert sizes[0] == min(concurrency, len(JOBS))


def test_each_environment_may_have_an_engine_of_its_own() -> None:
    trajectories = play(
        lambda env: ScriptedEngine(NoisyExpert(env, TEMPLATE)), make_env=lambda: InfoWatch(CorridorEnv())
    )
    assert [len(t.turns) for t in trajectories[:3]] == [2, 3, 4]


def test_environments_are_reused_and_closed() -> None:
    Counted.opened, Counted.closed = [], 0
    engine = MicroBatcher(walk)
    play(lambda env: engine, make_env=Counted)
    assert len(Counted.opened) == Counted.closed == 4
    assert sum(env.resets for env in Counted.opened) == len(JOBS)


def test_environments_may_be_kept() -> None:
    Counted.opened, Counted.closed = [], 0
    kept: list[Any] = []
    play(lambda env: MicroBatcher(walk), make_env=Counted, release_env=kept.append)
    assert kept == Counted.opened and Counted.closed == 0


def test_one_error_ends_all_and_leaves_nothing_behind() -> None:
    Counted.opened, Counted.closed = [], 0

    async def fail_later(requests: list[Request]) -> list[Generation]:
        if any(request.request_id.endswith("0002") for request in requests):
            raise RuntimeError("out of memory")
        return await walk(requests)

    engine = MicroBatcher(fail_later)
    with pytest.raises(SpearError, match="out of memory"):
        play(lambda env: engine, make_env=Counted)
    assert Counted.closed == 4
    assert engine.live == 0


def test_no_jobs_no_environments() -> None:
    assert play(lambda env: MicroBatcher(walk), jobs=[], make_env=lambda: pytest.fail("not needed")) == []
