"""Errors of ALFWorld's games."""

from __future__ import annotations

from spear_envs.core.errors import SpearError


class GameError(SpearError):
    """A game that cannot be played: a broken file, or one of another domain. The message names file and fault."""
