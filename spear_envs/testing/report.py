"""What a check found."""

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
    """Short name."""
    passed: bool
    """Whether the environment keeps this part of the contract."""
    seconds: float
    """Wall time it took."""
    detail: str
    """What was looked at, or what is wrong."""


@dataclass(frozen=True)
class CheckReport:
    """The outcome of all checks of one environment."""

    env_id: str
    kwargs: Mapping[str, Any]
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(result.passed for result in self.results)

    @property
    def failed_names(self) -> list[str]:
        """Names of the checks that failed."""
        return [result.name for result in self.results if not result.passed]

    def raise_on_failure(self) -> None:
        """Do nothing if all is well.

        Raises:
            ContractError: some check failed; the message lists which and why.
        """
        if not self.passed:
            found = "; ".join(f"{result.name}: {result.detail}" for result in self.results if not result.passed)
            raise ContractError(f"{self.env_id} breaks the contract of spear_envs: {found}")
