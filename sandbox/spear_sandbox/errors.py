"""The error that a user can fix."""

from __future__ import annotations


class SpearError(Exception):
    """Base of all errors that a user can fix. The message is one line that names the fix."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of the traceback."""
        return [f"{type(self).__name__}: {self}"]
