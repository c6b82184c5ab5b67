"""Differential tests against the original gym-sokoban 0.0.6: dynamics, rewards and every pixel."""

import random
from typing import Any

import numpy as np
import pytest

from spear_envs.sokoban.engine import ACTIONS, Board
from spear_envs.sokoban.generate import Recipe, find_solution, make_level
from spear_envs.sokoban.levels import Level, format_codes, parse_level
from spear_envs.sokoban.sprites import read_peer_tiles
from tests.spear_envs.sokoban.peer import open_peer

SIZES = [Recipe(6, 6, 1, 1, 15), Recipe(6, 6, 2, 1, 20), Recipe(7, 7, 2, 1, 20)]
STEPS = 3_000  # for each size; benchmarks/sokoban.py takes 50,000


def read_peer(env: Any) -> list[int]:
    """The peer's board in our codes."""
    return np.where((env.room_state == 5) & (env.room_fixed == 2), 6, env.room_state).astype(int).ravel().tolist()


def draw_peer_levels(peer: type[Any], recipe: Recipe, count: int) -> list[Level]:
    """Rooms of the peer's own generator, which reads both global streams."""
    states = random.getstate(), np.random.get_state()
    random.seed(recipe.boxes)
    np.random.seed(recipe.height)
    try:
        env = peer(dim_room=(recipe.height, recipe.width), num_boxes=recipe.boxes, num_gen_steps=30, reset=False)
        env.render = lambda *_, **__: None
        levels = []
        while len(levels) < count:
            env.reset()
            level = parse_level(format_codes(read_peer(env), recipe.width))
            if not level.solved and not level.codes.count(3):
                levels.append(level)
        return levels
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def make_levels(peer: type[Any], recipe: Recipe, count: int) -> list[Level]:
    """Half ours, half the peer's."""
    ours = [make_level(recipe, "peer", number) for number in range(count // 2)]
    return ours + draw_peer_levels(peer, recipe, count - count // 2)


def to_array(level: Level) -> np.ndarray:
    return np.array(level.codes).reshape(level.height, level.width)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", SIZES, ids=lambda recipe: recipe.name)
def test_dynamics_equal_the_peers(peer: type[Any], recipe: Recipe) -> None:
    """State, float64 reward, win, moved, pushed and boxes on target of 3,000 random steps a size.

    Random play seldom brings boxes home, so every fourth episode, not counted, follows the solver half of the time.
    """
    rng = np.random.default_rng(7)
    levels = make_levels(peer, recipe, 40)
    steps = wins = episodes = 0
    while steps < STEPS:
        level = levels[int(rng.integers(len(levels)))]
        theirs, ours = open_peer(peer, to_array(level), pictures=False), Board(level)
        guided = episodes % 4 == 3
        episodes += 1
        for action in rng.integers(0, 5, 120).tolist():
            if guided and rng.random() < 0.5:
                words = find_solution(parse_level(ours.text()))
                action = ACTIONS[words[0]] if words else action
            _, reward, done, info = theirs.step(action)
            assert ours.step(action) == reward
            assert ours.codes == read_peer(theirs)
            assert (ours.moved, ours.pushed) == (info["action.moved_player"], info["action.moved_box"])
            assert ours.won == done
            assert ours.on_target == theirs.boxes_on_target
            steps += not guided
            if done:
                wins += 1
                break
    assert wins > 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", SIZES, ids=lambda recipe: recipe.name)
def test_pixels_equal_the_peers(peer: type[Any], recipe: Recipe) -> None:
    """150 pictures a size, 450 in all, without one byte of difference."""
    rng = np.random.default_rng(8)
    tiles = read_peer_tiles()
    for level in make_levels(peer, recipe, 10):
        theirs, ours = open_peer(peer, to_array(level), pictures=True), Board(level, tiles)
        for action in rng.integers(0, 5, 15).tolist():
            picture, *_ = theirs.step(action)
            ours.step(action)
            assert picture.dtype == ours.frame().dtype == np.uint8
            assert picture.tobytes() == ours.frame().tobytes()
