"""The level generator: exact lengths, bounds, and the same levels everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spear_envs.sokoban.generate import Recipe, draw_held_out, draw_room, make_dice, make_level, parse_room
from spear_envs.sokoban.levels import (
    BOX_ON_TARGET,
    LevelError,
    SplitBy,
    digest_level,
    digest_room,
    find_split,
    parse_level,
)
from spear_envs.sokoban.search import find_solution

SIZES = [Recipe(), Recipe(boxes=2, shortest=6, longest=15), Recipe(7, 7, 2, 8, 20)]


@pytest.mark.parametrize("recipe", SIZES, ids=lambda recipe: recipe.name)
def test_reported_lengths_are_those_of_the_forward_solver(recipe: Recipe) -> None:
    for number in range(1_000):
        level = make_level(recipe, "length", number)
        words = find_solution(level)
        assert words is not None
        assert len(words) == level.optimal
        assert recipe.shortest <= len(words) <= recipe.longest


@pytest.mark.parametrize(
    "recipe", [*SIZES, Recipe(5, 5, 1, 1, 4), Recipe(5, 10, 3), Recipe(10, 10, 4), Recipe(9, 6, 1, 15, 30)],
    ids=lambda recipe: recipe.name,
)  # fmt: skip
def test_levels_are_what_was_asked_for(recipe: Recipe) -> None:
    for number in range(20):
        level = make_level(recipe, "shape", number)
        again = parse_level(level.text)
        assert again.codes == level.codes
        assert (again.height, again.width, len(again.boxes)) == (recipe.height, recipe.width, recipe.boxes)
        assert BOX_ON_TARGET not in again.codes


# The first levels of some recipes. They may never change within a version of the environment's id.
PINNED = {
    Recipe(): "######\n#P####\n#__###\n#_X###\n#_O###\n######",
    Recipe(boxes=2, shortest=4, longest=14): "######\n#O####\n#X#_##\n#_P_##\n#_X_O#\n######",
    Recipe(10, 10, 4): (
        "##########\n#####____#\n###___XO_#\n####_P#__#\n#####____#\n#####__X_#\n#####OX__#\n######XO##\n######O_##\n"
        "##########"
    ),
}


@pytest.mark.parametrize("recipe", PINNED, ids=lambda recipe: recipe.name)
def test_levels_never_change(recipe: Recipe) -> None:
    assert make_level(recipe, "train", 7, split="train").text == PINNED[recipe]


def test_no_global_random_stream_is_read_or_moved() -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    first = make_level(Recipe(), "globals", 0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[index, union-attr]
    random.seed(2)
    assert make_level(Recipe(), "globals", 0) == first


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("split_by", list(SplitBy))
def test_a_split_given_is_the_split_of_the_content(split: str, split_by: SplitBy) -> None:
    recipe = Recipe(split_by=split_by)
    for number in range(30):
        assert find_split(make_level(recipe, number, split=split).text, split_by) == split


def test_held_out_lists_are_disjoint_and_without_twins() -> None:
    lists = draw_held_out(Recipe(), 100)
    digests = {split: {digest_level(level.text) for level in levels} for split, levels in lists.items()}
    assert {split: len(found) for split, found in digests.items()} == {"valid": 100, "test": 100}
    assert not digests["valid"] & digests["test"]


def test_splitting_by_room_keeps_rooms_apart() -> None:
    recipe = Recipe()
    lists = draw_held_out(recipe, 64)
    rooms = {split: {digest_room(level.text) for level in levels} for split, levels in lists.items()}
    train = {digest_room(make_level(recipe, "train", number, split="train").text) for number in range(2_000)}
    assert not rooms["valid"] & rooms["test"]
    assert not train & (rooms["valid"] | rooms["test"])


@pytest.mark.nightly
def test_a_recipe_without_held_out_rooms_is_told() -> None:
    with pytest.raises(LevelError, match="too few rooms"):
        draw_held_out(Recipe(5, 5, 1, 6, 8), 256)


def test_rooms_are_closed_and_connected() -> None:
    for number in range(200):
        grid = draw_room(make_dice("room", number), 7, 9)
        cells = {i for i, floor in enumerate(grid) if floor}
        assert cells
        assert not any(i < 9 or i >= 54 or i % 9 in (0, 8) for i in cells)
        reached = {min(cells)}
        while more := {i + step for i in reached for step in (-9, 9, -1, 1)} & cells - reached:
            reached |= more
        assert reached == cells


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"height": 4}, "between 5 and 10"),
        ({"width": 11}, "between 5 and 10"),
        ({"boxes": 5}, "between 1 and 4"),
        ({"boxes": 0}, "between 1 and 4"),
        ({"shortest": 9, "longest": 8}, "shortest <= longest"),
        ({"shortest": 0}, "shortest <= longest"),
    ],
)
def test_recipes_out_of_range_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(LevelError, match=words):
        Recipe(**values)


def test_room_texts() -> None:
    assert parse_room("6x7") == (6, 7)
    assert parse_room("10X5") == (10, 5)
    for text in ("6", "6x", "x6", "6x6x6", "six", "-6x6", "6 x 6", "٦x٦"):
        with pytest.raises(LevelError, match="6x6"):
            parse_room(text)


def test_a_search_that_would_take_too_long_is_refused_instead() -> None:
    with pytest.raises(LevelError, match="budget of 50 states"):
        make_level(Recipe(10, 10, 4, 10, 30), 0, budget=50)
    with pytest.raises(LevelError, match="no 5x5 level"):
        make_level(Recipe(5, 5, 1, 40, 50), 0, budget=20_000)
