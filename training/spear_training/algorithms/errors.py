"""Errors of the algorithms that a user can mend."""

from __future__ import annotations

from spear_envs.core.errors import SpearError


class SettingsError(SpearError):  # no ValueError: pydantic would wrap it
    """A setting does not exist, has the wrong type or is out of range; the message names the key and the mend."""


class StateMismatchError(SpearError, ValueError):
    """A saved buffer does not fit the buffer it is loaded into; the message names both values."""
