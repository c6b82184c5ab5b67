"""The results of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spear_envs.core.errors import SpearError


class ContractError(SpearError):
    """An environment that breaks the contract."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    passed: bool
    """Whether the environment keeps this part of the contract."""
    seconds: float
    """Wall time."""
    detail: str
    """A summary of the check, or the problem."""


@dataclass(frozen=True)
class CheckReport:
    """The outcome of all checks of one environment."""

    env_id: str
    kwargs: Mapping[str, Any]
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Return whether all checks passed."""
        return all(result.passed for result in self.results)

    @property
    def failed_names(self) -> list[str]:
        """Return the names of the checks that failed."""
        return [result.name for result in self.results if not result.passed]

    def raise_on_failure(self) -> None:
        """Raise if a check failed.

        Raises:
            ContractError: a check failed; the message lists all failures and their reasons.
        """
        if not self.passed:
            found = "; ".join(f"{result.name}: {result.detail}" for result in self.results if not result.passed)
            raise ContractError(f"{self.env_id} breaks the contract of spear_envs: {found}")
