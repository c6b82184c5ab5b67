"""Batched boards equal single ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.sokoban.batch import Batch
from spear_envs.sokoban.engine import Board
from spear_envs.sokoban.generate import Recipe, make_level
from spear_envs.sokoban.levels import Level
from spear_envs.sokoban.sprites import draw_tiles
from tests.spear_envs.sokoban.conftest import RECIPES


@given(st.sampled_from(RECIPES), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_batch_equals_single_boards(recipe: Recipe, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = [make_level(recipe, "batch", number) for number in range(12)]
    levels = [pool[i] for i in rng.integers(0, 12, count)]
    batch = Batch(levels, draw_tiles())
    boards = [Board(level, draw_tiles()) for level in levels]
    for turn in range(25):
        rows = None
        chosen = np.arange(count)
        if turn % 3 == 2:
            rows = chosen = rng.permutation(count)[: rng.integers(1, count + 1)]
        moves = rng.integers(0, 5, len(chosen))
        rewards, moved, pushed = batch.step(moves, rows)
        assert rewards.tolist() == [boards[i].step(int(move)) for i, move in zip(chosen, moves, strict=True)]
        assert moved.tolist() == [boards[i].moved for i in chosen]
        assert pushed.tolist() == [boards[i].pushed for i in chosen]
        if turn % 5 == 4:
            again = rng.permutation(count)[: rng.integers(0, count + 1)]
            fresh = [pool[i] for i in rng.integers(0, 12, len(again))]
            batch.load(again, fresh)
            for i, level in zip(again, fresh, strict=True):
                boards[i].load(level)
        assert batch.texts() == [board.text() for board in boards]
        assert batch.texts(chosen) == [boards[i].text() for i in chosen]
        assert batch.won.tolist() == [board.won for board in boards]
        assert batch.on_target.tolist() == [board.on_target for board in boards]
        assert np.array_equal(batch.frames(), np.stack([board.frame() for board in boards]))
        assert [batch.read_board(i) for i in range(count)] == batch.texts()


def test_pictures_are_copies_unless_the_buffer_is_asked_for(level: Level) -> None:
    batch = Batch([level, level], draw_tiles())
    copied, buffer = batch.frames(), batch.frames(copy=False)
    kept = copied.copy()
    batch.step(np.array([4, 4]))
    assert np.array_equal(copied, kept)
    assert not np.array_equal(buffer, kept)
    assert np.array_equal(buffer, batch.frames())


def test_boards_of_a_batch_have_one_size(level: Level) -> None:
    batch = Batch([level])
    with pytest.raises(SpearError, match="the same size"):
        batch.load(np.array([0]), [make_level(Recipe(), 0)])
    with pytest.raises(RuntimeError, match="no tiles"):
        batch.frames()
