"""Errors of ALFWorld's games."""

from __future__ import annotations

from spear_envs.core.errors import SpearError


class GameError(SpearError):
    """A game cannot be played: its file is broken, or of another domain. The message names file and fault."""
