"""Errors that a user can mend; every message says how."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from spear_sandbox.errors import SpearError

__all__ = ["SpearError", "UnknownTaskError", "choose_member", "require_whole", "suggest_name"]

E = TypeVar("E", bound=Enum)


class UnknownTaskError(SpearError, KeyError):
    """A task id that is in no task set at hand."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, quotes and escapes included; people should read a plain sentence.
        return str(self.args[0]) if self.args else ""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the known name nearest to ``name``, or an empty string if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose_member(kind: type[E], value: object, keyword: str) -> E:
    """The member of ``kind`` with this value.

    Raises:
        SpearError: there is none; the message names the keyword and its valid values.
    """
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(repr(member.value) for member in kind)
        raise SpearError(f"{keyword}={value!r} is not valid: choose one of {valid}.") from None


def require_whole(keyword: str, value: object, least: int, most: int | None = None) -> int:
    """``value``, if it is a whole number of at least ``least`` and, where it is given, at most ``most``.

    Raises:
        SpearError: it is not, or is a bool; the message names the keyword and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise SpearError(f"{keyword}={value!r} is not valid: give a whole number {limits}.")
    return value
