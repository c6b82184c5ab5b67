"""The interpreter beside TextWorld, step for step. ``benchmarks/alfworld.py --steps 20000`` compares more."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spear_envs.alfworld.gamefile import TaskType
from spear_envs.alfworld.grammar import (
    KNOWN_PARTS,
    WORDING_2_1_2,
    Wording,
    digest_parts,
    read_wording,
    replace_sentence,
    split_grammar,
)
from spear_envs.alfworld.pddl import GameError
from spear_envs.alfworld.synthesis.games import write_synthetic_game
from spear_envs.alfworld.textworld import TextWorldPlay
from tests.spear_envs.alfworld.odd_games import GOALS, make_odd, make_release_2_1_1, patch_release_2_1_1
from tests.spear_envs.alfworld.peer import (
    MEND,
    Counts,
    compare_play,
    follow_oracle,
    has_textworld,
    play_randomly,
    run_errands,
)
from tests.spear_envs.alfworld.small import WORDING_2_1_1, make_data, write_problem

pytestmark = pytest.mark.skipif(not has_textworld(), reason=MEND)


@pytest.fixture(scope="module")
def peer() -> TextWorldPlay:
    return TextWorldPlay()


def check(counts: Counts, least: int) -> None:
    assert not counts.mismatches
    assert counts.steps >= least


def change_nothing(data: dict[str, Any]) -> dict[str, Any]:
    return data


@pytest.mark.parametrize("change", [change_nothing, make_release_2_1_1, patch_release_2_1_1])
def test_the_small_game(peer: TextWorldPlay, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    data, rng = change(make_data()), random.Random(change.__name__)
    check(compare_play(peer, data, run_errands, rng, 30, change.__name__), 30)


@pytest.mark.parametrize("goal", GOALS)
def test_goals_of_every_form(peer: TextWorldPlay, goal: str) -> None:
    data, rng = make_data(write_problem(goal)), random.Random(goal)
    check(compare_play(peer, data, run_errands, rng, 12, goal), 1)


def test_the_small_game_made_odd(peer: TextWorldPlay) -> None:
    facts = (
        "(isClean Apple_bar_1) (isHot Apple_bar_1) (isSliced Apple_bar_1) (opened Fridge_bar_1) (toggleable Mug_bar_1)"
        " (isToggled Mug_bar_1) (holds agent1 Knife_bar_1) (holdsAny agent1) (inReceptacleObject Mug_bar_1 Mug_bar_1)"
        " (wasInReceptacle Mug Desk_bar_1) (moveable Apple)"
    )
    text = write_problem(facts=facts).replace("Spoon_bar_1", "odd_plus_spoon").replace("Egg_bar_1", "%s.*[e]$^#g_bar_1")
    text = text.replace("DeskLamp_bar_1", "12'\"&<lamp>,_bar_1").replace("Cabinet_bar_2", "ca\\nbi/net:_bar_2")
    text = text.replace("(atLocation agent1 loc_bar_0)", "(atLocation agent1 loc_bar_2)")
    check(compare_play(peer, make_data(text), run_errands, random.Random(3), 35, "odd"), 35)


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
    total = Counts()
    for seed, split in enumerate(("train", "valid_seen", "valid_unseen")):
        path = write_synthetic_game(task_type.value, 7_000 + seed, tmp_path, split)
        data = json.loads(path.read_text("utf-8"))
        for policy in (run_errands, follow_oracle, play_randomly):
            rng = random.Random(f"{task_type.value}{seed}{policy.__name__}")
            total.add(compare_play(peer, data, policy, rng, 50, str(path)))
    check(total, 100)


@pytest.mark.nightly
def test_more_official_and_odd_games(peer: TextWorldPlay, official_games: Path) -> None:
    paths, total = sorted(official_games.rglob("game.tw-pddl")), Counts()
    for number in range(24):
        rng = random.Random(number)
        path = rng.choice(paths)
        data = json.loads(path.read_text("utf-8"))
        if number % 2:
            data = make_odd(data, rng)
        total.add(compare_play(peer, data, rng.choice((run_errands, play_randomly)), rng, 40, f"{path} {number}"))
    check(total, 300)


def read(data: dict[str, Any]) -> Wording:
    return read_wording(split_grammar(data["grammar"])[1], data["pddl_domain"])


def test_what_is_built_in_is_alfworlds() -> None:
    data = make_data()
    assert digest_parts(split_grammar(data["grammar"])[1], data["pddl_domain"]) == KNOWN_PARTS


def test_the_releases_speak_as_the_constants_say() -> None:
    data = make_data()
    assert read(data) == WORDING_2_1_2
    assert read(make_release_2_1_1(data)) == WORDING_2_1_1
    assert read(patch_release_2_1_1(data)) == replace(WORDING_2_1_2, sinks=WORDING_2_1_1.sinks)


@pytest.mark.parametrize(
    ("part", "old", "new", "fault"),
    [
        ("grammar", "You close the {r.name}.", "You shut the {r.name}.", "rule 'CloseObject.feedback' is different"),
        ("grammar", '"list_separator"', '"list_comma"', "rule 'list_separator' is different"),
        ("grammar", "You move the {o.name} to the {r.name}.", "Done.", "unknown way"),
        ("grammar", "move {o} to {r}", "move {r}", "unknown way"),
        ("grammar", "open {r}", "unlock {r}", "action openobject is different"),
        ("grammar", "action help {", "action hilfe {", "no words for the action 'help'"),
        ("grammar", '"intro": [', '"intro": ', "not JSON"),
        ("grammar", '"GotoLocation.feedback": [', '"GotoLocation.feedback": [{"rhs": "x"}, ', "exactly one text"),
        ("pddl_domain", "(not (opened ?r))\n", "\n", "action openobject is different"),
        ("pddl_domain", "(:action SliceObject", "(:action CutObject", "no words for the action 'cutobject'"),
        ("pddl_domain", "(:action inventory", "(:action", "no words for the action"),
        ("pddl_domain", "(define", "((define", "PDDL domain ends within"),
    ],
)
def test_a_game_of_another_kind_is_refused(part: str, old: str, new: str, fault: str) -> None:
    data = make_data()
    assert old in data[part]
    data[part] = data[part].replace(old, new, 1)
    with pytest.raises(GameError, match=fault):
        read(data)


def test_a_missing_action_is_noticed() -> None:
    data = make_data()
    domain = data["pddl_domain"]
    data["pddl_domain"] = domain[: domain.index(";; agent slices")] + domain[domain.index("(:action help") :]
    with pytest.raises(GameError, match="action sliceobject is missing"):
        read(data)


def test_a_grammar_without_a_task() -> None:
    with pytest.raises(GameError, match="Your task is to"):
        split_grammar(re.sub("Your task is to", "Do", make_data()["grammar"]))
    with pytest.raises(GameError, match="Your task is to"):
        replace_sentence("", "x")
