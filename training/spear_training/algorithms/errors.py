"""Errors of the algorithms that users can fix."""

from __future__ import annotations

from spear_envs.core.errors import SpearError


class SettingsError(SpearError):  # not a ValueError, which pydantic would wrap
    """A setting is unknown, has the wrong type or is out of range; the message names the key and the fix."""


class StateMismatchError(SpearError, ValueError):
    """A saved buffer has other settings than the one it is loaded into; the message names both values."""
