"""Findings of checks, and how to fix them."""

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
    """It works, but was not tested, or something optional is missing."""
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
            raise ValueError(f"the finding {self.name!r} lacks a fix")

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "verdict": self.verdict.value}


Check = Callable[[], Iterable[Finding]]
"""Checks one thing; an exception is also a problem."""


def name_check(check: Check) -> str:
    """Name of a check on the command line."""
    return check.__name__.removeprefix("check_")


def examine(check: Check) -> list[Finding]:
    """Run a check; exceptions become findings."""
    try:
        return list(check())
    except Exception as error:
        name = name_check(check).replace("_", " ")
        mend = "This is a bug of the check: please report this line."
        return [Finding(name, Verdict.PROBLEM, f"the check failed: {type(error).__name__}: {error}", mend)]
