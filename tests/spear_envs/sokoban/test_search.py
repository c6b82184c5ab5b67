"""Exact searches, and the generator of levels."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.sokoban.engine import ACTIONS, Board
from spear_envs.sokoban.generate import (
    Recipe,
    draw_held_out,
    draw_room,
    find_solution,
    make_dice,
    make_level,
    measure_backward,
    parse_room,
)
from spear_envs.sokoban.levels import (
    BOX_ON_TARGET,
    Level,
    LevelError,
    SplitBy,
    digest_level,
    find_split,
    parse_level,
)
from spear_envs.sokoban.tasks import make_task_set
from tests.spear_envs.sokoban.conftest import actions, levels


def count_moves(level: Level) -> int | None:
    """Length of a shortest solution by breadth-first search over board texts, played by the engine."""
    seen = {level.text}
    queue = deque([(level, 0)])
    while queue:
        position, moves = queue.popleft()
        if position.solved:
            return moves
        for action in range(1, 5):
            board = Board(position)
            board.step(action)
            if board.text() not in seen:
                seen.add(board.text())
                queue.append((parse_level(board.text()), moves + 1))
    return None


def play(level: Level, words: list[str]) -> Board:
    board = Board(level)
    for word in words:
        assert not board.won
        board.step(ACTIONS[word])
    return board


@settings(max_examples=60)
@given(levels)
def test_solutions_win_in_exactly_the_optimal_number_of_moves(level: Level) -> None:
    words = find_solution(level)
    assert words is not None
    assert len(words) == level.optimal
    assert play(level, words).won


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1_000), actions)
def test_the_solver_agrees_with_plain_search_from_any_position(number: int, moves: list[int]) -> None:
    board = Board(make_level(Recipe(5, 6, 1, 1, 15), number))
    for move in moves:
        if not board.won:
            board.step(move)
    position = parse_level(board.text())
    words = find_solution(position)
    assert (None if words is None else len(words)) == count_moves(position)


def test_lost_positions_have_no_solution() -> None:
    assert find_solution(parse_level("######\n#X_P_#\n#__O_#\n#____#\n######")) is None  # in a corner
    assert find_solution(parse_level("######\n#_X_P#\n#____#\n#__O_#\n######")) is None  # along a wall
    # Two boxes side by side along a wall with the targets in it: found only by searching.
    assert find_solution(parse_level("######\n#OXXO#\n#_P__#\n######")) is None


def test_searches_stop_at_their_budget() -> None:
    level = make_level(Recipe(8, 8, 3, 8, 16), 0)
    with pytest.raises(LevelError, match="budget of 20 states"):
        find_solution(level, budget=20)
    grid = [int(code != 0) for code in level.codes]
    with pytest.raises(LevelError, match="budget of 100 states"):
        measure_backward(grid, 8, level.targets, 16, budget=100)


SIZES = [Recipe(), Recipe(boxes=2, shortest=6, longest=15), Recipe(7, 7, 2, 8, 20)]


@pytest.mark.parametrize("recipe", SIZES, ids=lambda recipe: recipe.name)
def test_reported_lengths_are_those_of_the_forward_solver(recipe: Recipe) -> None:
    for number in range(250):
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


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("split_by", list(SplitBy))
def test_a_split_given_is_the_split_of_the_content(split: str, split_by: SplitBy) -> None:
    recipe = Recipe(split_by=split_by)
    for number in range(30):
        assert find_split(make_level(recipe, number, split=split).text, split_by) == split


def test_held_out_lists_are_disjoint_and_without_twins() -> None:
    lists = draw_held_out(Recipe(), 256)
    digests = {split: {digest_level(level.text) for level in levels} for split, levels in lists.items()}
    assert {split: len(found) for split, found in digests.items()} == {"valid": 256, "test": 256}
    assert not digests["valid"] & digests["test"]
    for split, drawn in lists.items():  # as the package has them
        packaged = [task.content for task in make_task_set(Recipe(), split)]
        assert packaged == [{"level": level.text, "optimal": level.optimal} for level in drawn]


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


def test_room_texts() -> None:
    assert parse_room("6x7") == (6, 7)
    assert parse_room("10X5") == (10, 5)
    for text in ("6", "6x", "x6", "6x6x6", "six", "-6x6", "6 x 6", "٦x٦"):
        with pytest.raises(LevelError, match="6x6"):
            parse_room(text)
