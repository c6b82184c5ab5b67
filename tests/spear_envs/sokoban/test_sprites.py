"""Tiles: our own, and those of the peer."""

from __future__ import annotations

import hashlib
import importlib.util
import sys

import numpy as np
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.sokoban.sprites import draw_tiles, load_tiles, read_peer_tiles
from tests.spear_envs.sokoban.peer import MEND, find_peer


def test_our_tiles_never_change() -> None:
    tiles = draw_tiles()
    assert tiles.shape == (7, 16, 16, 3)
    assert tiles.dtype == np.uint8
    assert hashlib.sha256(tiles.tobytes()).hexdigest() == TILES_DIGEST


TILES_DIGEST = "89d8fdf63f63155f402abc88560f436136dc18e94ccfbc344d665168b4810e45"


def test_our_tiles_differ_from_one_another_in_many_pixels() -> None:
    tiles = draw_tiles().astype(int)
    for a in range(7):
        for b in range(a):
            far = np.abs(tiles[a] - tiles[b]).sum(-1) > 60
            assert far.sum() >= 60, (a, b, far.sum())


def test_peer_tiles_are_read_without_importing_it() -> None:
    if find_peer() is None:
        pytest.skip(MEND)
    read_peer_tiles.cache_clear()
    before = set(sys.modules)
    assert read_peer_tiles().shape == (7, 16, 16, 3)
    assert not any(name.split(".")[0] in ("gym", "gym_sokoban") for name in set(sys.modules) - before)


def test_a_missing_wheel_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    read_peer_tiles.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpearError, match=r"pip install --no-deps gym-sokoban==0\.0\.6"):
        load_tiles("gym-sokoban")
    read_peer_tiles.cache_clear()
