"""Levels: parsing, digests, splits, published files and task sets."""

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.core.tasks import check_disjoint, choose_subset
from spear_envs.sokoban.engine import ACTIONS, Board
from spear_envs.sokoban.env import SokobanEnv
from spear_envs.sokoban.generate import Recipe, find_solution
from spear_envs.sokoban.levels import (
    Level,
    LevelError,
    SplitBy,
    compact_spaced,
    digest_level,
    digest_room,
    find_band,
    find_split,
    find_symmetries,
    format_codes,
    format_spaced,
    parse_level,
)
from spear_envs.sokoban.tasks import DEFAULT_FINGERPRINTS, make_task_set, read_level
from tests.spear_envs.sokoban.conftest import levels

BOARD = "######\n#_SO_#\n#X_√X#\n#____#\n######"


@given(levels)
def test_parsing_a_formatted_level_gives_it_back(level: Level) -> None:
    assert format_codes(level.codes, level.width) == level.text
    again = parse_level(level.text)
    assert (again.codes, again.height, again.width) == (level.codes, level.height, level.width)
    assert compact_spaced(format_spaced(level.text)) == level.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "both sides"),
        ("###\n#P#\n####", "same length"),
        ("#####\n#PX.#\n#####", "write it with"),
        ("#####\n#PXO#\n##_##", "border"),
        ("#####\n#_XO#\n#####", "0 players"),
        ("######\n#PSXX#\n#_OO_#\n######", "2 players"),
        ("#####\n#P_O#\n#####", "lacks a box"),
        ("######\n#PX_O#\n#_OO_#\n######", "1 boxes and 3 targets"),
        ("\n".join(["#" * 65] * 65), "between 3 and 64"),
        ("####\n#P\0#\n####", "write it with"),
    ],
)
def test_a_bad_level_is_refused_in_one_line_that_names_the_mend(text: str, words: str) -> None:
    with pytest.raises(LevelError) as caught:
        parse_level(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SpearError)


def test_spaced_form_puts_each_cell_between_blanks_and_a_tab() -> None:
    assert format_spaced("#_\nP√") == " # \t _ \t\n P \t √ \t"


@given(levels, st.integers(0, 7))
def test_digests_are_those_of_every_rotation_and_reflection(level: Level, which: int) -> None:
    forms = find_symmetries(level.text)
    assert len(forms) == 8
    assert digest_level(forms[which]) == digest_level(level.text)
    assert digest_room(forms[which]) == digest_room(level.text)
    assert find_split(forms[which]) == find_split(level.text)


def test_the_digest_of_a_room_looks_at_walls_and_targets_alone() -> None:
    board = "######\n#P_O_#\n#_X__#\n######"
    assert digest_room(board) == digest_room("######\n#__O_#\n#_XP_#\n######")
    assert digest_room(board) == digest_room("######\n#__S_#\n#_X__#\n######")
    assert digest_room(board) != digest_room("######\n#P__O#\n#_X__#\n######")
    assert digest_level(board) != digest_level("######\n#PXO_#\n#____#\n######")


def test_a_shift_or_a_few_steps_of_the_player_make_no_other_level() -> None:
    board = "#######\n#P_O_##\n#_X__##\n#######"
    shifted = "#######\n#######\n##P_O_#\n##_X__#\n#######"
    assert digest_level(board) == digest_level(shifted) and digest_room(board) == digest_room(shifted)
    for walked in ("#_PO_##\n#_X__##", "#__S_##\n#_X__##", "#__O_##\n#_X_P##", "#__O_##\n#PX__##"):
        assert digest_level(board) == digest_level(f"#######\n{walked}\n#######"), walked
    # The box cuts the room in two: on its other side the player has another puzzle.
    assert digest_level("#######\n#P_X_O#\n#######") != digest_level("#######\n#__XPO#\n#######")
    assert digest_level("#######\n#P_X_O#\n#######") == digest_level("#######\n#_PX_O#\n#######")


def test_splits_follow_the_first_32_bits_of_the_digest() -> None:
    # Pinned: they may never change, or published levels would move between the splits.
    assert digest_level(BOARD) == "0b0ac11fc6f102102eaddb7b7736964d69e79676d6f519a9967d12a6d03a666c"
    assert digest_room(BOARD) == "5076a7d035abdea24d54f2fc9e6253251f84cdb1a2641924980326f35cbe3a99"
    counts = {"train": 0, "valid": 0, "test": 0}
    for number in range(4_000):
        text = f"#{number:b}O#".replace("1", "_").replace("0", "#")
        split = find_split(text)
        share = int(digest_room(text)[:8], 16) / 2**32
        assert split == ("test" if share < 0.1 else "valid" if share < 0.2 else "train")
        counts[split] += 1
    assert 300 < counts["test"] < 500
    assert 300 < counts["valid"] < 500


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


def test_choosing_among_many_levels_solves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[Any] = []
    monkeypatch.setattr("spear_envs.sokoban.tasks.find_optimum", lambda level: solved.append(level) or 1)
    rows = "\n".join(f"; {number}\n#####\n#@$.#\n#####\n" for number in range(300))
    env = make(levels=write(tmp_path, "many.xsb", rows))
    chosen = choose_subset(env.tasks, 8)
    assert len(chosen) == 8 and len(solved) <= 8
    few = make(levels=write(tmp_path, "few.xsb", rows.partition("; 9")[0]))
    assert few.tasks.bounded, "a few are chosen by subtask"


def test_a_collection_in_xsb_and_sok(tmp_path: Path) -> None:
    path = write(tmp_path, "two.sok", "\ufeff" + XSB.replace("\n", "\r\n"))
    env = make(levels=str(path))
    assert [task.content["level"].split("\n")[1:-1] for task in env.tasks] == [["####__###", "#_P_X__O#"], ["#O_XP__#"]]
    assert [task.content["optimal"] for task in env.tasks] == [4, 2]
    assert make(levels=path, number=2).tasks[0].content["level"] == env.tasks[1].content["level"]


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.xsb", "; 7\n#####\n#@$.#\n#####\n")
    before = make(levels=path).tasks
    assert make(levels=path).tasks is before
    write(tmp_path, "mine.xsb", "; 8\n######\n#@$ .#\n######\n")
    assert make(levels=path, number=8).tasks[0].content["optimal"] == 2
    assert make(levels=path).tasks[0].content["optimal"] == 2 and before[0].content["optimal"] == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("line", ["; " + "9" * 5000, "9" * 5000 + "#", "#" * 100_000 + "x", "#" + " " * 100_000 + "x"])
def test_long_lines_around_a_level(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "long.xsb", f"{line}\n\n#####\n#@$.#\n#####\n")
    assert len(make(levels=path).tasks) == 1


def test_a_folder_may_have_a_readme_and_a_home_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "mine/a.xsb", "\t#####\t\n\t#@$.#\n\t#####\n")
    write(tmp_path, "mine/readme.txt", "Levels of my own.\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="readme"):
        tasks = make(levels="~/mine").tasks
    assert len(tasks) == 1 and tasks[0].content["optimal"] == 1


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


@pytest.mark.parametrize(
    ("text", "keywords", "word"),
    [
        ("no level", {}, "no level"),
        ("#####\n#@$.\n#####", {}, "outer wall"),
        ("#####\n#@$ #\n#####", {}, "level 1"),
        ("#####\n#@ *#\n#####", {}, "already solved"),
        ("#" * 3000 + "@" + "\n#" * 3000, {}, "3001x3001"),
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


def test_a_search_that_takes_too_long_gives_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(level=HALL)
    env.reset(seed=0)
    monkeypatch.setattr("spear_envs.sokoban.env.find_solution", lambda level, budget: find_solution(level, 1_000))
    assert env.expert_plan() == []


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_default_splits_never_change(split: str) -> None:
    tasks = make_task_set(Recipe(), split)
    assert tasks.fingerprint == DEFAULT_FINGERPRINTS[split]
    assert len(tasks) == (1_000_000 if split == "train" else 256)
    task = tasks[17]
    assert task.id == f"sokoban-v1/6x6-1/{split}/00000017"
    assert tasks.get(task.id) == task
    assert task.subtask == find_band(task.content["optimal"])


def test_splits_are_disjoint_by_content() -> None:
    splits = [make_task_set(Recipe(), split) for split in ("train", "valid", "test")]
    assert check_disjoint(*splits, sample=1_000) == 1_512


def test_held_out_levels_are_new_whatever_the_split_goes_by() -> None:
    for split_by in SplitBy:
        train = make_task_set(Recipe(split_by=split_by), "train")
        seen = {digest_level(train[place].content["level"]) for place in range(500)}
        for split in ("valid", "test"):
            held_out = make_task_set(Recipe(split_by=split_by), split)
            assert not seen & {digest_level(task.content["level"]) for task in held_out}


def test_the_oracle_wins_every_embedded_task_in_exactly_its_optimal_number_of_moves() -> None:
    for split in ("valid", "test"):
        for task in make_task_set(Recipe(), split):
            level = read_level(task.content["level"])
            words = find_solution(level)
            assert words is not None
            assert len(words) == task.content["optimal"] <= 15
            board = Board(level)
            for word in words:
                board.step(ACTIONS[word])
            assert board.won


def test_an_id_names_one_level_only() -> None:
    recipes = [Recipe(), Recipe(longest=13), Recipe(boxes=2), Recipe(split_by=SplitBy.LEVEL), Recipe(6, 7)]
    ids = [make_task_set(recipe, "train")[5].id for recipe in recipes]
    assert len(set(ids)) == len(recipes)
    with pytest.raises(UnknownTaskError):
        make_task_set(Recipe(), "train").get(ids[1])
    with pytest.raises(UnknownTaskError, match="run from"):
        make_task_set(Recipe(), "test").get("sokoban-v1/6x6-1/test/00000256")
