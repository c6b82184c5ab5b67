"""Task sets: ids, fingerprints, disjoint splits, levels given by hand."""

from __future__ import annotations

import pytest

from spear_envs.core.errors import UnknownTaskError
from spear_envs.core.tasks import check_disjoint
from spear_envs.sokoban.engine import ACTIONS, Board
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.levels import LevelError, SplitBy, digest_level, find_band
from spear_envs.sokoban.search import find_solution
from spear_envs.sokoban.tasks import DEFAULT_FINGERPRINTS, make_level_set, make_task_set, read_level


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_default_splits_never_change(split: str) -> None:
    tasks = make_task_set(Recipe(), split)
    assert tasks.fingerprint == DEFAULT_FINGERPRINTS[split]
    assert len(tasks) == (1_000_000 if split == "train" else 256)
    task = tasks[17]
    assert task.id == f"sokoban-v1/6x6-1/{split}/00000017"
    assert tasks.get(task.id) == task
    assert task.subtask == find_band(task.content["optimal"])


def test_splits_are_disjoint_by_content_over_5000_draws() -> None:
    splits = [make_task_set(Recipe(), split) for split in ("train", "valid", "test")]
    assert check_disjoint(*splits, sample=5_000) == 5_512


def test_held_out_levels_are_new_whatever_the_split_goes_by() -> None:
    for split_by in SplitBy:
        train = make_task_set(Recipe(split_by=split_by), "train")
        seen = {digest_level(train[place].content["level"]) for place in range(2_000)}
        for split in ("valid", "test"):
            held_out = make_task_set(Recipe(split_by=split_by), split)
            assert not seen & {digest_level(task.content["level"]) for task in held_out}


def test_held_out_levels_differ() -> None:
    for split in ("valid", "test"):
        tasks = make_task_set(Recipe(), split)
        assert len({digest_level(task.content["level"]) for task in tasks}) == 256


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


def test_a_level_by_hand_is_a_set_of_one() -> None:
    text = "######\n#P_O_#\n#_X__#\n#____#\n######"
    tasks = make_level_set(text)
    assert len(tasks) == 1
    task = tasks[0]
    assert task.content == {"level": text, "optimal": 5}
    assert task.subtask == "len4-6"
    assert task.id.startswith("sokoban-v1/5x6-1/level/")
    assert task.id != make_level_set(text.replace("P_", "_P"))[0].id
    assert make_level_set(text + "\n")[0].id == task.id


def test_a_level_may_start_with_boxes_on_targets() -> None:
    assert make_level_set("#######\n#P√_XO#\n#_____#\n#######")[0].content["optimal"] == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("####\n#P√#\n####", "already solved"),
        ("#####\n#PX_#\n#__O#\n#####", "cannot be solved"),
        ("#####\n#PXO#\n###", "same length"),
    ],
)
def test_levels_that_cannot_be_played_are_refused(text: str, words: str) -> None:
    with pytest.raises(LevelError, match=words):
        make_level_set(text)
