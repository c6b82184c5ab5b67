from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spear_envs.alfworld.env import ALFWorldEnv
from spear_envs.alfworld.searching import search
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.alfworld.task_types import TaskType
from spear_envs.core.errors import SpearError
from tests.spear_envs.alfworld.synthetic import open_synthetic, synthetic_games


def make(**options: Any) -> ALFWorldEnv:
    return ALFWorldEnv(rooms="small", split="valid_unseen", **{"expert": "searching", **options})


@pytest.mark.parametrize("number", range(0, 240, 12))
def test_the_searching_expert_wins_and_keeps_to_what_it_said(number: int) -> None:
    env = make()
    env.reset(options={"task": env.tasks[number].id})
    said = env.expert_plan()
    played = []
    info: dict[str, Any] = {}
    while not env.done:
        played.append(env.expert_plan()[0])
        *_, info = env.step(env.parser.respond(played[-1]))
    assert info["won"]
    assert played == said


@settings(max_examples=25, deadline=None)
@given(synthetic_games, st.integers(0, 2**32))
@example(make_game(TaskType.CLEAN, "train", 62066, RoomSize.SMALL), 142)
def test_what_lies_in_hidden_places_changes_no_command(synthetic: SyntheticGame, seed: int) -> None:
    """Two rooms that differ only where nothing was shown: the next command is the same."""
    game = open_synthetic(synthetic)
    shown = set(Random(seed).sample(game.receptacles, len(game.receptacles) // 2))
    state = game.new_state()
    other = state.copy()
    hidden = [name for name in game.receptacles if name not in shown]
    rotated = dict(zip(hidden, [state.contents[name] for name in (*hidden[1:], *hidden[:1])], strict=True))
    other.contents |= rotated
    other.opened ^= frozenset(name for name in hidden if name in game.openable)
    assert search(game, state, shown)[:1] == search(game, other, shown)[:1] or game.goal.holds(other)


def test_it_looks_around_before_it_finds_what_the_planner_knows() -> None:
    searching, planner = make(), make(expert="planner")
    longer = 0
    for task in list(searching.tasks)[:40]:
        for env in (searching, planner):
            env.reset(options={"task": task.id})
        longer += len(searching.expert_plan()) > len(planner.expert_plan())
        assert len(searching.expert_plan()) >= len(planner.expert_plan())
    assert longer > 20


def test_what_was_shown_survives_a_saved_state() -> None:
    env = make()
    env.reset(options={"task": env.tasks[3].id})
    env.step(env.parser.respond(env.expert_plan()[0]))
    before, saved = env.expert_plan(), env.get_state()
    env.step(env.parser.respond(before[0]))
    env.set_state(saved)
    assert env.expert_plan() == before


def test_thoughts_tell_nothing_that_was_not_shown() -> None:
    env = make()
    for number in range(0, 240, 30):
        env.reset(options={"task": env.tasks[number].id})
        seen = env._opening
        while not env.done:
            plan = env.expert_plan()
            thought = env.expert_thought(plan)
            assert plan[0] in thought
            # "countertop 1" was seen, and so was every numbered thing that a thought names.
            named = {
                " ".join(pair) for pair in zip(thought.split(), thought.replace(".", "").split()[1:], strict=False)
            }
            assert all(name in seen for name in named if name.split()[1].isdigit())
            observation, *_ = env.step(env.parser.respond(plan[0], thought))
            seen += observation


def test_a_thought_says_what_is_missing_and_what_is_next() -> None:
    env = make()
    env.reset(options={"task": env.tasks[0].id})
    plan = env.expert_plan()
    assert "not found" in env.expert_thought(plan)
    for command in plan[:-1]:
        env.step(env.parser.respond(command))
    assert env.expert_thought(plan[-1:]) == f"I can do the next step here: {plan[-1]}."
    assert env.expert_thought([]) == ""


def test_there_are_two_experts() -> None:
    with pytest.raises(SpearError, match="expert"):
        make(expert="oracle")
