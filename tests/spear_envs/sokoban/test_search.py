"""Exact searches: against each other, and against a plain breadth-first search."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.sokoban.engine import ACTIONS, Board
from spear_envs.sokoban.generate import Recipe, make_level
from spear_envs.sokoban.levels import Level, LevelError, parse_level
from spear_envs.sokoban.search import CELL_BITS, find_solution, measure_backward, measure_pushes
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


@given(levels, actions)
def test_one_move_changes_the_distance_by_one_at_most(level: Level, moves: list[int]) -> None:
    board, left = Board(level), level.optimal
    for move in moves[:12]:
        if board.won:
            break
        board.step(move)
        words = find_solution(parse_level(board.text()))
        if words is None:
            break  # a push may lose everything
        assert left is not None
        assert len(words) >= left - 1
        if not board.pushed:
            assert len(words) <= left + 1
        left = len(words)


def test_lost_positions_have_no_solution() -> None:
    assert find_solution(parse_level("######\n#X_P_#\n#__O_#\n#____#\n######")) is None  # in a corner
    assert find_solution(parse_level("######\n#_X_P#\n#____#\n#__O_#\n######")) is None  # along a wall
    # Two boxes side by side along a wall with the targets in it: found only by searching.
    assert find_solution(parse_level("######\n#OXXO#\n#_P__#\n######")) is None


def test_a_solved_level_needs_no_moves() -> None:
    assert find_solution(parse_level("####\n#P√#\n####")) == []


def test_backward_layers_hold_every_start_by_its_distance() -> None:
    grid = [int(c == "_") for c in "#######____#######"]
    layers = measure_backward(grid, 6, [10], 9)
    states = [{(state >> CELL_BITS, state & 511) for state in layer} for layer in layers]
    assert states[0] == {(1 << 10, 7), (1 << 10, 8), (1 << 10, 9)}
    assert states[1] == {(1 << 9, 8)}
    assert states[2] == {(1 << 9, 7), (1 << 8, 7)}
    assert states[3:] == [set()]


def test_push_distances_know_where_no_box_comes_back_from() -> None:
    codes = parse_level("######\n#P_O_#\n#_X__#\n#____#\n######")
    pushes = measure_pushes(codes.codes, 6, codes.targets)
    assert pushes[9] == 0
    assert pushes[8] == 1
    assert pushes[14] == 2
    assert 7 not in pushes  # the corner
    assert 19 not in pushes


def test_searches_stop_at_their_budget() -> None:
    level = make_level(Recipe(8, 8, 3, 8, 16), 0)
    with pytest.raises(LevelError, match="budget of 20 states"):
        find_solution(level, budget=20)
    grid = [int(code != 0) for code in level.codes]
    with pytest.raises(LevelError, match="budget of 100 states"):
        measure_backward(grid, 8, level.targets, 16, budget=100)
