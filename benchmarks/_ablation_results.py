"""What the recorded results of the ablation amount to: runs by arm, means over seeds, paired differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._ablation_plan import BASES, Scenario
from benchmarks._ablation_run import choose_rates, read_result
from spear_agents.statistics import Estimate, estimate_mean

__all__ = ["ArmResult", "compare", "compare_arms", "read_arms"]

TAIL = 0.1
"""Share of the steps that "first" and "last" figures are means over."""


@dataclass(frozen=True)
class ArmResult:
    """The recorded runs of one arm, one a seed."""

    arm: str
    rate: str
    runs: Sequence[Mapping[str, Any]]

    @property
    def seeds(self) -> list[int]:
        """Of the runs, in their order."""
        return [run["seed"] for run in self.runs]

    def won(self, seeds: Collection[int] | None = None) -> dict[str, float]:
        """Share won of each task of the test panel, mean over seeds (all of them unless some are given)."""
        runs = [run for run in self.runs if seeds is None or run["seed"] in seeds]
        return {task: fmean(run["test_panel"]["won"][task] for run in runs) for task in runs[0]["test_panel"]["won"]}

    @property
    def success(self) -> Estimate:
        """Of the test panel, mean over seeds, with the interval over tasks."""
        return estimate_mean(list(self.won().values()))

    def average(self, name: str, part: slice | None = None) -> float:
        """Mean of a curve over steps and seeds; of its first or last tenth where ``part`` says so."""
        values = [value or 0.0 for run in self.runs for value in run["curves"][name][part or slice(None)]]
        return fmean(values)

    @property
    def tenth(self) -> int:
        """Number of steps in a tenth of the run."""
        return max(1, round(TAIL * len(self.runs[0]["curves"]["success"])))


def compare(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean over tasks of ``after - before``, with the interval of that paired difference.

    Raises:
        ValueError: the two are not on the same tasks.
    """
    if before.keys() != after.keys():
        raise ValueError("the results are not on the same tasks")
    return estimate_mean([after[task] - before[task] for task in before])


def read_arms(scenario: Scenario, results: Path) -> list[ArmResult]:
    """Arms of which at least one seed is recorded, in the order of the scenario."""
    found = []
    for arm, rate in choose_rates(results, scenario).items():
        runs = [read_result(results, scenario, trial.name) for trial in scenario.list_reported(arm, rate)]
        recorded = [run for run in runs if run is not None]
        if recorded:
            found.append(ArmResult(arm, rate, recorded))
    return found


def compare_arms(arms: Sequence[ArmResult], arm: ArmResult) -> tuple[ArmResult, list[int], Estimate] | None:
    """An arm beside the one without self-imitation: that one, the seeds that both have, and the paired difference.

    Returns None where there is no such arm, or no seed in common: other seeds would compare luck.
    """
    base = next((other for other in arms if other.arm == BASES.get(arm.arm)), None)
    if base is None:
        return None
    seeds = [seed for seed in arm.seeds if seed in base.seeds]
    return (base, seeds, compare(base.won(seeds), arm.won(seeds))) if seeds else None
