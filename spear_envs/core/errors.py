"""Errors that a user can mend; every message says how."""

from __future__ import annotations

import difflib
import inspect
import operator
import traceback
from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from spear_sandbox.errors import SpearError

__all__ = [
    "SpearError",
    "UnknownTaskError",
    "choose_member",
    "describe_error",
    "refuse_unknown",
    "require_whole",
    "suggest_name",
]

E = TypeVar("E", bound=Enum)


class UnknownTaskError(SpearError, KeyError):
    """A task id that is in no task set at hand."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, quotes and escapes included; people should read a plain sentence.
        return str(self.args[0]) if self.args else ""


def describe_error(error: BaseException) -> str:
    """An error that is not ours, with its type and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


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
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # NumPy's whole numbers too
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise SpearError(f"{keyword}={value!r} is not valid: give a whole number {limits}.")
    return number


def refuse_unknown(cls: type, keywords: Iterable[str]) -> None:
    """Do nothing if the constructor of ``cls`` takes all these keywords.

    Raises:
        SpearError: it does not; the message names one that it lacks, and those that it has.
    """
    known: dict[str, None] = {}
    for kind in cls.__mro__:  # a subclass that takes **more hands them to the next
        if "__init__" in vars(kind):
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            known.update((parameter.name, None) for parameter in parameters if parameter.kind in kinds)
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
                break
    known.pop("self", None)
    for name in keywords:
        if name not in known:
            has = ", ".join(known)
            raise SpearError(f"{cls.__name__} has no keyword {name!r}.{suggest_name(name, known)} It has {has}.")
