"""One board: moves, rewards, texts and pictures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from spear_envs.sokoban.engine import DOWN, LEFT, RIGHT, STILL, UP, Board
from spear_envs.sokoban.levels import Level, format_codes, parse_level
from spear_envs.sokoban.sprites import Image, draw_tiles
from tests.spear_envs.sokoban.conftest import actions, levels

BACK = {UP: DOWN, DOWN: UP, LEFT: RIGHT, RIGHT: LEFT}


def draw_whole(board: Board) -> Image:
    """The picture of a board, all of it drawn anew."""
    tiles = draw_tiles()
    rows = [np.concatenate([tiles[code] for code in board.codes[i : i + board.width]], axis=1)
            for i in range(0, len(board.codes), board.width)]  # fmt: skip
    return np.concatenate(rows, axis=0)


@pytest.mark.parametrize(
    ("before", "action", "after", "reward"),
    [
        ("#P__#", RIGHT, "#_P_#", -0.1),
        ("#P__#", LEFT, "#P__#", -0.1),
        ("#P__#", UP, "#P__#", -0.1),
        ("#P__#", STILL, "#P__#", -0.1),
        ("#PO_#", RIGHT, "#_S_#", -0.1),
        ("#SO_#", RIGHT, "#OS_#", -0.1),
        ("#PX_O#", RIGHT, "#_PXO#", -0.1),
        ("#SX_O#", RIGHT, "#OPXO#", -0.1),
        ("#PXO_#", RIGHT, "#_P√_#", 0.9),
        ("#P√_O#", RIGHT, "#_SXO#", -1.1),
        ("#P√O_#", RIGHT, "#_S√_#", -0.1),
        ("#PXX_#", RIGHT, "#PXX_#", -0.1),
        ("#PX#_#", RIGHT, "#PX#_#", -0.1),
        ("#P√√_#", RIGHT, "#P√√_#", -0.1),
    ],
)
def test_moves_and_rewards(before: str, action: int, after: str, reward: float) -> None:
    width = len(before)
    # A second pair of box and target far away keeps the board from being solved and balances the numbers.
    boxes, targets = sum(c in "X√" for c in before), sum(c in "OS√" for c in before)
    rest = "#" + "X" * (1 + max(0, targets - boxes)) + "#" + "O" * (1 + max(0, boxes - targets))
    wide = max(width, len(rest) + 1)
    rows = ["#" * wide, before.ljust(wide, "#"), "#" * wide, rest.ljust(wide, "#"), "#" * wide]
    board = Board(parse_level("\n".join(rows)))
    assert board.step(action) == reward
    assert board.text().split("\n")[1] == after.ljust(wide, "#")
    assert board.moved == (before != after)
    assert board.pushed == (board.moved and before[2] in "X√")


def test_the_winning_push_pays_all() -> None:
    board = Board(parse_level("######\n#PXO_#\n######"))
    assert board.step(RIGHT) == -0.1 + 1 + 10
    assert board.won


@given(levels, actions)
def test_text_codes_and_counts_stay_together(level: Level, moves: list[int]) -> None:
    board = Board(level)
    for move in moves:
        board.step(move)
        assert board.text() == format_codes(board.codes, board.width)
        position = parse_level(board.text())
        assert position.player == board.player
        assert position.codes.count(3) == board.on_target
        assert position.solved == board.won
        assert position.targets == level.targets
        assert len(position.boxes) == len(level.boxes)


@given(levels, actions)
def test_drawing_changed_tiles_equals_drawing_all(level: Level, moves: list[int]) -> None:
    board = Board(level, draw_tiles())
    for number, move in enumerate(moves):
        board.step(move)
        if number % 3:  # several moves may lie between two pictures
            assert np.array_equal(board.frame(), draw_whole(board))
    board.load(level)
    assert np.array_equal(board.frame(), draw_whole(Board(level)))


@given(levels, actions)
def test_a_walk_is_undone_by_walking_back_and_a_push_by_its_state(level: Level, moves: list[int]) -> None:
    board = Board(level)
    for move in moves:
        before = board.text()
        board.step(move)
        if board.pushed:
            # What lies behind the player now is what it left; pulling the box back gives the board of before.
            codes, here = list(board.codes), board.player
            step = {UP: -board.width, DOWN: board.width, LEFT: -1, RIGHT: 1}[move]
            for cell, piece in ((here - step, 5), (here, 4), (here + step, None)):
                on = board.below[cell] == 2
                codes[cell] = board.below[cell] if piece is None else (6 if on else 5) if piece == 5 else 3 if on else 4
            assert format_codes(codes, board.width) == before
        elif board.moved:
            again = Board(parse_level(board.text()))
            again.step(BACK[move])
            assert again.text() == before
        else:
            assert board.text() == before


def test_pictures_are_fresh_copies(level: Level) -> None:
    board = Board(level, draw_tiles())
    first = board.frame()
    kept = first.copy()
    board.step(RIGHT)
    assert np.array_equal(first, kept)
    first[:] = 0
    assert board.frame().any()


def test_a_board_without_tiles_has_no_picture(level: Level) -> None:
    with pytest.raises(RuntimeError, match="no tiles"):
        Board(level).frame()


def test_a_board_takes_levels_of_other_sizes(level: Level) -> None:
    board = Board(level, draw_tiles())
    board.frame()
    board.load(parse_level("####\n#P_#\n#XO#\n####"))
    assert board.frame().shape == (64, 64, 3)
    assert np.array_equal(board.frame(), draw_whole(board))
