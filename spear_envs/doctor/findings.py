"""What a check has found, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """How bad it is."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Works, but is not what was tested, or something optional is absent."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    found: str
    """What there is."""
    mend: str = ""
    """What to do; empty if all is well."""

    def __post_init__(self) -> None:
        if (self.verdict is Verdict.PROBLEM) and not self.mend:
            raise ValueError(f"the finding {self.name!r} names no mend")

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "verdict": self.verdict.value}


Check = Callable[[], Iterable[Finding]]
"""Looks at one thing and says what it found. One that raises has found a problem itself."""


def name_check(check: Check) -> str:
    """What a check is called on the command line."""
    return check.__name__.removeprefix("check_")


def examine(check: Check) -> list[Finding]:
    """The findings of a check, whatever happens in it."""
    try:
        return list(check())
    except Exception as error:
        name = name_check(check).replace("_", " ")
        mend = "This is a fault of the check: please report it with this line."
        return [Finding(name, Verdict.PROBLEM, f"the check failed: {type(error).__name__}: {error}", mend)]
