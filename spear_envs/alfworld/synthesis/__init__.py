"""Synthetic games in ALFWorld's format, made from tables and a seed, without ALFRED's data."""

from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game, write_game, write_synthetic_game
from spear_envs.alfworld.synthesis.rooms import RoomSize

__all__ = ["RoomSize", "SyntheticGame", "make_game", "write_game", "write_synthetic_game"]
