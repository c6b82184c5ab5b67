"""Running all checks on one environment, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from spear_envs.core.errors import SpearError, describe_error
from spear_envs.core.making import explain_unknown, find_creator
from spear_envs.testing.checks import CHECKS, ContractError, Subject


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


def check_spear_env(
    id: str,
    *,
    train_tasks: int = 64,
    resets: int = 1000,
    raise_on_failure: bool = True,
    on_check: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Check that an environment keeps the contract.

    It passes gymnasium's checker; finds tasks by id; has all keys of info; takes any response without raising; ends
    once; shows the same to all members of a group; gives the same trace in processes with different
    ``PYTHONHASHSEED``; returns to any state; keeps its splits apart by content; is won by its expert, on every task of
    a bounded split; plays the same in gymnasium's vector environments; can be pickled and specified as JSON; and does
    not leak memory.

    Args:
        id: registered id, ``"module:id"`` included.
        train_tasks: tasks that the expert plays of an unbounded split.
        resets: number of resets of the memory check.
        on_check: called with the name of each check before it runs.
        kwargs: keywords of the environment. With ``split`` among them, only that split is tried.

    Raises:
        ContractError: a check failed and ``raise_on_failure`` is set; the message names all failures.
        SpearError: the environment is unknown, or cannot be made with these keywords.
    """
    subject = Subject(id, kwargs, train_tasks, resets)
    try:
        # So that what breaks every check is one clear error, not one per check.
        find_creator(id)
        with subject.opened() as env:
            env.tasks.fingerprint  # noqa: B018
    except gym.error.Error as error:
        raise explain_unknown(id, error) from error
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise SpearError(f"{id} cannot be made: {error}") from error
    subject.id = id.rpartition(":")[2]  # registered by now
    results = []
    for name, check in CHECKS.items():
        if on_check is not None:
            on_check(name)
        start = time.perf_counter()
        try:
            detail, passed = check(subject), True
        except SpearError as error:
            detail, passed = str(error), False
        except Exception as error:  # a bug in the environment under test is a finding, not a crash of the checker
            detail, passed = describe_error(error), False
        results.append(CheckResult(name, passed, time.perf_counter() - start, detail))
    report = CheckReport(id, dict(kwargs), tuple(results))
    if raise_on_failure:
        report.raise_on_failure()
    return report
