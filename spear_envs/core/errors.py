"""Errors that a user can fix; every message says how."""

from __future__ import annotations

import inspect
import math
import operator
import traceback
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar

from spear_sandbox.errors import SpearError, explain_invalid, suggest_name

__all__ = [
    "SpearError",
    "UnknownTaskError",
    "choose_member",
    "describe_error",
    "explain_invalid",
    "first_line",
    "one_line",
    "refuse_unknown",
    "require_whole",
    "suggest_name",
]

E = TypeVar("E", bound=Enum)


class UnknownTaskError(SpearError, KeyError):
    """A task id is unknown."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; people should read a plain sentence.
        return str(self.args[0]) if self.args else ""


def describe_error(error: BaseException) -> str:
    """Describe an error that is not ours, with its type, file and line."""
    if isinstance(error, SyntaxError):  # it names its own place; the last frame is Python's importer
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, 200 characters of it at most, or its type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def name_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; its repr may hold a whole file."""
    return f"{type(error).__name__}: {first_line(error)}"


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, 200 characters of it at most, or its type if there is none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def choose_member(kind: type[E], value: object, keyword: str) -> E:
    """Find the member of ``kind`` with this value.

    Raises:
        SpearError: the value is not valid; the message names the keyword and its valid values.
    """
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(repr(member.value) for member in kind)
        raise SpearError(f"{keyword}={value!r} is not valid: choose one of {valid}.") from None


def require_whole(keyword: str, value: object, least: int, most: int | None = None) -> int:
    """Return ``value`` if it is a whole number of at least ``least`` and, if given, at most ``most``.

    Raises:
        SpearError: it is not, or is a bool; the message names the keyword and the limits.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # also NumPy's integers
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise SpearError(f"{keyword}={value!r} is not valid: give a whole number {limits}.")
    return number


def refuse_unknown(cls: type, keywords: Iterable[str]) -> None:
    """Refuse keywords that the constructor of ``cls`` does not take.

    Raises:
        SpearError: one is unknown; the message lists the known ones.
    """
    known: dict[str, None] = {}
    for kind in cls.__mro__:  # a subclass that takes **more passes them on
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


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


STRICT_JSON: Final[Mapping[str, Any]] = {"parse_constant": _refuse_constant, "parse_float": _read_float}
"""Keywords of Python's JSON reader that refuse NaN and infinite numbers: JSON cannot write them again.

A record with NaN would never equal itself.
"""


class EnvFault(SpearError):
    """A hook of an environment failed because a sandbox, a retriever or another service did, not the policy.

    ``SpearEnv.step`` turns it into ``truncated=True``, reward 0 and ``info["fault"] = kind``, so that a trainer can
    leave the trajectory out of its loss and statistics. ``SpearEnv.reset`` raises it.

    Args:
        kind: short stable name, for counting, such as ``"retriever_timeout"``.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind
