"""Level files as they are published, and levels that are too long for the paper's turns or for the solver."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.sokoban.env import SokobanEnv

BOXOBAN = """\
; 0
########
#  .   #
# #$#@ #
#    $.#
########

; 7
########
# . $@ #
########
"""
XSB = """\
Two of ours  # 2024

; first

   ####
####  ##
# @ $  .#
#########

Title: first
Author: us

8#|#.-$@2-#|8#
Title: second
"""
HALL = "\n".join(
    [
        "#" * 14,
        "#@" + " " * 11 + "#",
        *["#" + " " * 12 + "#"] * 4,
        "#" + "  $ " * 3 + "#",
        "#" + " " * 12 + "#",
        "#" + "  $ " * 3 + "#",
        "#" + " " * 12 + "#",
        "#" + " .  " * 3 + "#",
        "#" + " .  " * 3 + "#",
        "#" * 14,
    ]
)
"""A hall with six boxes, which the solver does not finish."""
LONG = "#" * 24 + "\n#@$" + " " * 20 + ".#\n" + "#" * 24


def make(**keywords: Any) -> SokobanEnv:
    env = gym.make(
        "spear_envs:spear/Sokoban-v1", modality="text", response_format="plain", disable_env_checker=True, **keywords
    )
    assert isinstance(env.unwrapped, SokobanEnv)
    return env.unwrapped


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def win(env: SokobanEnv, task: str) -> tuple[bool, int]:
    _, info = env.reset(options={"task": task})
    for action in env.expert_plan():
        *_, info = env.step(action)
    return info["won"], info["optimal"]


def test_a_boxoban_file(tmp_path: Path) -> None:
    env = make(levels=write(tmp_path, "000.txt", BOXOBAN))
    assert [task.content["optimal"] for task in env.tasks] == [13, 2]
    assert [win(env, task.id) for task in env.tasks] == [(True, 13), (True, 2)]
    assert make(levels=tmp_path / "000.txt", number=7).tasks[0].content["level"] == "########\n#_O_XP_#\n########"
    assert make(levels=tmp_path / "000.txt").tasks.fingerprint == env.tasks.fingerprint


def test_a_collection_in_xsb_and_sok(tmp_path: Path) -> None:
    path = write(tmp_path, "two.sok", "\ufeff" + XSB.replace("\n", "\r\n"))
    env = make(levels=str(path))
    assert [task.content["level"].split("\n")[1:-1] for task in env.tasks] == [["####__###", "#_P_X__O#"], ["#O_XP__#"]]
    assert [task.content["optimal"] for task in env.tasks] == [4, 2]
    assert make(levels=path, number=2).tasks[0].content["level"] == env.tasks[1].content["level"]


def test_folders_make_the_splits(tmp_path: Path) -> None:
    for split, text in (("train", BOXOBAN), ("valid", XSB)):
        write(tmp_path, f"{split}/000.txt", text)
        write(tmp_path, f"{split}/001.txt", text)
    assert [len(make(levels=tmp_path, split=split).tasks) for split in ("train", "valid", "all")] == [4, 4, 8]
    with pytest.raises(SpearError, match="no level file"):
        make(levels=tmp_path, split="test")


def test_without_folders_the_content_makes_the_splits(tmp_path: Path) -> None:
    boards = [f"{'#' * (n + 5)}\n#@$.{' ' * n}#\n{'#' * (n + 5)}" for n in range(59)]
    path = write(tmp_path, "many.xsb", "\n\n".join(boards))
    parts = {
        split: [task.content["level"] for task in make(levels=path, split=split).tasks]
        for split in ("train", "valid", "test")
    }
    assert sorted(level for part in parts.values() for level in part) == sorted(
        task.content["level"] for task in make(levels=path).tasks
    )
    assert min(map(len, parts.values())) > 0


def test_pictures_of_a_file_have_one_size(tmp_path: Path) -> None:
    env = SokobanEnv(levels=write(tmp_path, "b.txt", BOXOBAN), response_format="plain")
    for task in env.tasks:
        observation, _ = env.reset(options={"task": task.id})
        assert env.observation_space.contains(observation)
    wall = observation["image"][:16, :16]
    assert np.array_equal(observation["image"][-16:, :16], wall)  # below the smaller level


@pytest.mark.parametrize(
    ("text", "keywords", "word"),
    [
        ("no level", {}, "no level"),
        ("#####\n#@$.\n#####", {}, "outer wall"),
        ("#####\n#@$ #\n#####", {}, "level 1"),
        (BOXOBAN, {"number": 1}, "no such level"),
        (BOXOBAN, {"split": "tests"}, "Did you mean"),
        (BOXOBAN, {"level": "x"}, "exclude"),
    ],
)
def test_what_a_file_does_not_have_is_refused(tmp_path: Path, text: str, keywords: Any, word: str) -> None:
    with pytest.raises(SpearError, match=word):
        make(levels=write(tmp_path, "x.txt", text), **keywords)


def test_a_missing_file_and_a_number_without_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="neither a file nor a folder"):
        make(levels=tmp_path / "none")
    with pytest.raises(SpearError, match="needs levels"):
        make(number=3)


@pytest.mark.parametrize(
    ("keywords", "turns"),
    [
        ({}, 15),
        ({"longest": 15}, 15),
        ({"longest": 16}, 32),
        ({"longest": 30, "moves_per_turn": 2}, 15),
        ({"level": LONG}, 42),
        ({"level": LONG, "moves_per_turn": 2}, 15),
        ({"level": LONG, "max_turns": 30}, 30),
        ({"level": HALL}, 1_000),
    ],
)
def test_turns_follow_from_the_optimum(keywords: Any, turns: int) -> None:
    env = make(**keywords)
    assert env.max_turns == turns


def test_each_generated_task_can_be_won_within_its_turns() -> None:
    env = make(room="8x8", shortest=14, longest=30)
    for task in env.tasks[:20]:
        optimal = env.reset(options={"task": task.id})[1]["optimal"]
        assert env.max_turns == (15 if optimal <= 15 else 2 * optimal)


def test_turns_that_win_nothing_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="cannot be won"):
        make(level=LONG, max_turns=20)
    env = make(levels=write(tmp_path, "000.txt", BOXOBAN), max_turns=10)
    with pytest.warns(UserWarning, match="00000 cannot be won"):
        env.reset(options={"task": env.tasks[0].id})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(level=LONG, max_turns=21)
        env.reset(options={"task": env.tasks[1].id})


def test_a_level_that_the_solver_cannot_finish_is_played() -> None:
    env = make(level=HALL, diagnostics=True)
    assert env.tasks[0].content["optimal"] is None and env.tasks[0].subtask == "unsolved"
    info = env.reset(seed=0)[1]
    assert (info["optimal"], info["solvable"]) == (0, True)
    assert env.step("right")[-1]["moved"]
