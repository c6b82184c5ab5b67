"""Levels and strategies for Sokoban's tests."""

from typing import Any

import pytest
from hypothesis import strategies as st

from spear_envs.sokoban.generate import Recipe, make_level
from spear_envs.sokoban.levels import Level
from tests.spear_envs.sokoban.peer import MEND, find_peer, load_peer

RECIPES = (Recipe(), Recipe(boxes=2, shortest=4, longest=14), Recipe(7, 7, 2, 6, 14), Recipe(5, 8, 1, 1, 15))

levels = st.builds(lambda recipe, number: make_level(recipe, "test", number), st.sampled_from(RECIPES),
                   st.integers(0, 10_000))  # fmt: skip
"""Levels of several sizes."""
actions = st.lists(st.integers(0, 4), max_size=40)
"""Moves as the engines take them."""


@pytest.fixture(scope="session")
def peer() -> type[Any]:
    """gym-sokoban's environment class."""
    if find_peer() is None:
        pytest.skip(MEND)
    return load_peer()


@pytest.fixture
def level() -> Level:
    """A small level, five moves long: down, right, down, right, up."""
    from spear_envs.sokoban.levels import parse_level

    return parse_level("######\n#P_O_#\n#_X__#\n#____#\n######")
