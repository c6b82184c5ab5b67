"""The error that a user can mend."""

from __future__ import annotations


class SpearError(Exception):
    """Base of all errors that a user can mend. The message is one line that names the mend."""
