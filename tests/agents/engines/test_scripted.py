from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import Sampling
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine, random_policy
from spear_agents.episode import play_episode
from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from tests.agents.corridor import CorridorEnv

TEMPLATE = CorridorEnv.templates["compact"]


def play(env: InfoWatch, engine: ScriptedEngine, task: int = 2, seed: int = 0) -> Trajectory:
    return asyncio.run(
        play_episode(
            env,
            engine,
            PromptBuilder(ByteTokenizer(), TEMPLATE),
            task_id=f"corridor/test/{task:03d}",
            sampling=Sampling(),
            seed=seed,
            env_id="corridor",
        )
    )


@given(st.text(st.characters()))
def test_bytes_give_back_any_text(text: str) -> None:
    codec = ByteTokenizer()
    assert codec.decode([*codec.encode(text), 256]) == text


def test_a_policy_sees_the_prompt_and_a_stream_of_its_own() -> None:
    seen = []

    def policy(prompt: str, dice: random.Random) -> str:
        seen.append((prompt, dice.random()))
        return "élan"

    engine = ScriptedEngine(policy)
    prompt = ByteTokenizer().encode("où?")
    answer = asyncio.run(engine.generate(prompt, Sampling(seed=4, max_tokens=1), request_id="x"))
    assert ByteTokenizer().decode(answer.token_ids) == "élan"
    assert answer.log_probs == (0.0,) * len(answer.token_ids)
    assert seen == [("où?", random.Random(4).random())]


def test_a_noisy_expert_errs_and_plans_anew() -> None:
    env = InfoWatch(CorridorEnv(max_turns=40))
    engine = ScriptedEngine(NoisyExpert(env, TEMPLATE, noise=0.5))
    played = [play(env, engine, seed=seed) for seed in range(40)]
    assert all(trajectory.won for trajectory in played)
    actions = Counter(turn.action for trajectory in played for turn in trajectory.turns)
    # Half of the turns are random and half of those go back.
    assert 0.15 < actions["back"] / actions.total() < 0.35


def test_errors_can_be_actions_that_were_possible_before() -> None:
    class Doors(CorridorEnv):
        def _admissible(self) -> list[str]:
            return ["go", f"open {self.place}"]

    env = InfoWatch(Doors(lengths=(4,), max_turns=60))
    played = {}
    for share in (0.0, 1.0):
        engine = ScriptedEngine(NoisyExpert(env, TEMPLATE, noise=0.5, inadmissible=share))
        turns = [turn for seed in range(30) for turn in play(env, engine, task=0, seed=seed).turns]
        # The door of another cell than the one that the observation shows.
        played[share] = sum(
            turn.action.startswith("open") and turn.action != f"open {turn.observation.index('P')}" for turn in turns
        ) / len(turns)
    assert played[0.0] == 0
    assert 0.15 < played[1.0] < 0.5  # in the first cell there is no other door yet


def test_the_expert_says_what_it_would_have_done() -> None:
    env = InfoWatch(CorridorEnv(max_turns=40))
    expert = NoisyExpert(env, TEMPLATE, noise=0.9)
    assert expert.advice is None
    for seed in range(3):
        play(env, ScriptedEngine(expert), seed=seed)
        assert expert.advice == TEMPLATE.respond("go")


def test_an_expert_can_write_down_its_thoughts() -> None:
    class Talking(CorridorEnv):
        def expert_thought(self, plan: Sequence[str]) -> str:
            return f"{len(plan)} to go"

    env = InfoWatch(Talking(lengths=(3,), max_turns=40))

    def think(**options: Any) -> list[tuple[str, str]]:
        engine = ScriptedEngine(NoisyExpert(env, TEMPLATE, **options))
        return [(turn.action, turn.response.partition("</think>")[0]) for turn in play(env, engine, task=0).turns]

    assert think(thoughts=True) == [("go", "<think>3 to go"), ("go", "<think>2 to go"), ("go", "<think>1 to go")]
    assert {thought for _, thought in think()} == {"<think>"}
    strayed = think(thoughts=True, noise=0.9)
    assert {"<think>"} == {thought for action, thought in strayed if action == "back"}, "an error has no reason"


def test_a_lost_position_is_planned_once_and_played_to_the_end() -> None:
    env = InfoWatch(CorridorEnv())
    calls = 0

    def no_plan() -> list[str]:
        nonlocal calls
        calls += 1
        return []

    env.unwrapped.expert_plan = no_plan  # type: ignore[attr-defined]
    expert = NoisyExpert(env, TEMPLATE)
    engine = ScriptedEngine(expert)
    assert len(play(env, engine).turns) > 1
    assert calls == 1 and expert.advice is None
    play(env, engine)
    assert calls == 2


def test_the_random_policy_is_uniform_and_well_formed() -> None:
    env = InfoWatch(CorridorEnv(max_turns=30))
    engine = ScriptedEngine(random_policy(env, TEMPLATE))
    played = [play(env, engine, seed=seed) for seed in range(60)]
    actions = Counter(turn.action for trajectory in played for turn in trajectory.turns)
    assert set(actions) == {"go", "back"}
    assert abs(actions["go"] / actions.total() - 0.5) < 0.06
    assert all(trajectory.format_ok for trajectory in played)
    assert play(env, engine, seed=3) == played[3]


def test_no_listed_actions_no_random_policy() -> None:
    env = InfoWatch(CorridorEnv())
    env.info = {"admissible_actions": None}
    with pytest.raises(SpearError, match=r"^CorridorEnv does not list .*: take the engine expert"):
        env.admissible_actions()
