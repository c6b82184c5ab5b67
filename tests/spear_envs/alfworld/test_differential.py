"""The interpreter beside TextWorld, step for step. ``benchmarks/alfworld.py --steps 20000`` compares more."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spear_envs.alfworld.synthesis.files import write_synthetic_game
from spear_envs.alfworld.task_types import TaskType
from spear_envs.alfworld.textworld import TextWorldPlay
from tests.spear_envs.alfworld.odd_games import GOALS, make_odd, make_release_2_1_1, patch_release_2_1_1
from tests.spear_envs.alfworld.peer import (
    MEND,
    Tally,
    compare_play,
    follow_oracle,
    has_textworld,
    play_randomly,
    run_errands,
)
from tests.spear_envs.alfworld.small import make_data, write_problem

pytestmark = pytest.mark.skipif(not has_textworld(), reason=MEND)


@pytest.fixture(scope="module")
def peer() -> TextWorldPlay:
    return TextWorldPlay()


def check(tally: Tally, least: int) -> None:
    assert not tally.mismatches
    assert tally.steps >= least


def change_nothing(data: dict[str, Any]) -> dict[str, Any]:
    return data


@pytest.mark.parametrize("change", [change_nothing, make_release_2_1_1, patch_release_2_1_1])
def test_the_small_game(peer: TextWorldPlay, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    data, rng = change(make_data()), random.Random(change.__name__)
    check(compare_play(peer, data, run_errands, rng, 60, change.__name__), 60)


@pytest.mark.parametrize("goal", GOALS)
def test_goals_of_every_form(peer: TextWorldPlay, goal: str) -> None:
    data, rng = make_data(write_problem(goal)), random.Random(goal)
    check(compare_play(peer, data, run_errands, rng, 25, goal), 1)


def test_the_small_game_made_odd(peer: TextWorldPlay) -> None:
    facts = (
        "(isClean Apple_bar_1) (isHot Apple_bar_1) (isSliced Apple_bar_1) (opened Fridge_bar_1) (toggleable Mug_bar_1)"
        " (isToggled Mug_bar_1) (holds agent1 Knife_bar_1) (holdsAny agent1) (inReceptacleObject Mug_bar_1 Mug_bar_1)"
        " (wasInReceptacle Mug Desk_bar_1) (moveable Apple)"
    )
    text = write_problem(facts=facts).replace("Spoon_bar_1", "odd_plus_spoon").replace("Egg_bar_1", "%s.*[e]$^#g_bar_1")
    text = text.replace("DeskLamp_bar_1", "12'\"&<lamp>,_bar_1").replace("Cabinet_bar_2", "ca\\nbi/net:_bar_2")
    text = text.replace("(atLocation agent1 loc_bar_0)", "(atLocation agent1 loc_bar_2)")
    check(compare_play(peer, make_data(text), run_errands, random.Random(3), 70, "odd"), 70)


@pytest.mark.parametrize("task_type", [TaskType.HEAT, TaskType.PICK2])
def test_synthetic_games(peer: TextWorldPlay, task_type: TaskType, tmp_path: Path) -> None:
    path = write_synthetic_game(task_type.value, 123_456, tmp_path, rooms="small")
    data = json.loads(path.read_text("utf-8"))
    check(compare_play(peer, data, follow_oracle, random.Random(task_type.value), 40, task_type.value), 3)


@pytest.mark.slow
def test_an_official_game(peer: TextWorldPlay, official_games: Path) -> None:
    path = sorted(official_games.rglob("game.tw-pddl"))[77]
    data = json.loads(path.read_text("utf-8"))
    check(compare_play(peer, data, run_errands, random.Random(1), 30, str(path)), 3)


@pytest.mark.nightly
@pytest.mark.parametrize("task_type", list(TaskType))
def test_more_synthetic_games(peer: TextWorldPlay, task_type: TaskType, tmp_path: Path) -> None:
    total = Tally()
    for seed, split in enumerate(("train", "valid_seen", "valid_unseen")):
        path = write_synthetic_game(task_type.value, 7_000 + seed, tmp_path, split)
        data = json.loads(path.read_text("utf-8"))
        for policy in (run_errands, follow_oracle, play_randomly):
            rng = random.Random(f"{task_type.value}{seed}{policy.__name__}")
            total.add(compare_play(peer, data, policy, rng, 50, str(path)))
    check(total, 100)


@pytest.mark.nightly
def test_more_official_and_odd_games(peer: TextWorldPlay, official_games: Path) -> None:
    paths, total = sorted(official_games.rglob("game.tw-pddl")), Tally()
    for number in range(24):
        rng = random.Random(number)
        path = rng.choice(paths)
        data = json.loads(path.read_text("utf-8"))
        if number % 2:
            data = make_odd(data, rng)
        total.add(compare_play(peer, data, rng.choice((run_errands, play_randomly)), rng, 40, f"{path} {number}"))
    check(total, 300)
