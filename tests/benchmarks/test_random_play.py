"""Random play, exact and sampled."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks._random_play import measure_random_play
from spear_envs.sokoban.engine import Board
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.levels import Level, parse_level
from spear_envs.sokoban.tasks import make_task_set, read_level


def sample_random_play(levels: list[Level], seed: int) -> float:
    """Share of 15-move episodes that random play wins, one a level."""
    rng = np.random.default_rng(seed)
    return sum(is_won(Board(level), rng.integers(1, 5, 15).tolist()) for level in levels) / len(levels)


def is_won(board: Board, moves: list[int]) -> bool:
    for move in moves:
        board.step(move)
        if board.won:
            return True
    return False


def read_levels(recipe: Recipe, split: str, count: int) -> list[Level]:
    tasks = make_task_set(recipe, split)
    return [read_level(tasks[i].content["level"]) for i in range(count)]


def test_exact_values_of_small_boards() -> None:
    corridor = parse_level("#####\n#PXO#\n#####")
    assert measure_random_play(corridor, 1) == 0.25
    assert measure_random_play(corridor, 2) == 1 - 0.75**2
    assert measure_random_play(parse_level("####\n#XP#\n#_O#\n####"), 15) == 0.0


def test_the_default_levels_are_won_by_random_play_as_often_as_recorded() -> None:
    """9.6 % were recorded for levels of 3 to 12 moves; 5,000 episodes on 5,000 training levels."""
    assert 100 * sample_random_play(read_levels(Recipe(), "train", 5_000), 0) == pytest.approx(9.6, abs=1.5)


def test_the_papers_kind_of_levels_are_won_far_more_often() -> None:
    """Levels of 1 to 15 moves: 18.3 % +- 0.5 over many draws of this generator."""
    recipe = Recipe(shortest=1, longest=15)
    assert 100 * sample_random_play(read_levels(recipe, "train", 5_000), 0) == pytest.approx(18.3, abs=1.5)


@pytest.mark.parametrize(("split", "exact"), [("valid", 7.95), ("test", 7.63)])
def test_exact_baseline_of_the_panels(split: str, exact: float) -> None:
    """Levels of the panels differ up to symmetry, which makes them a little harder than draws from the generator."""
    levels = read_levels(Recipe(), split, 256)
    assert 100 * np.mean([measure_random_play(level) for level in levels]) == pytest.approx(exact, abs=0.01)
    assert 100 * sample_random_play(levels * 20, 0) == pytest.approx(exact, abs=1.5)
