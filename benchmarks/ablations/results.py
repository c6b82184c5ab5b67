"""Summaries of the ablation's recorded results: runs by arm, means over seeds, paired differences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.ablations.plan import BASES, Scenario
from benchmarks.ablations.run import choose_rates, read_result
from spear_agents.comparison.significance import estimate_crossed
from spear_agents.comparison.statistics import Estimate, estimate_difference

__all__ = ["ArmResult", "Beside", "compare_arms", "compare_with_start", "pool_seeds", "read_arms"]


@dataclass(frozen=True)
class ArmResult:
    """The recorded runs of one arm, one a seed."""

    arm: str
    rate: str
    runs: Sequence[Mapping[str, Any]]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, in their order."""
        return [run["seed"] for run in self.runs]

    def won(self, seeds: Collection[int] | None = None) -> dict[str, float]:
        """Share won of each task of the test panel, mean over seeds (all of them unless some are given)."""
        runs = [run for run in self.runs if seeds is None or run["seed"] in seeds]
        return {task: fmean(run["test_panel"]["won"][task] for run in runs) for task in runs[0]["test_panel"]["won"]}

    def table(self, seeds: Collection[int] | None = None, panel: str = "test_panel") -> np.ndarray:
        """Share won by seed and task, float64 [seeds, tasks], tasks in the order of their ids."""
        runs = [run for run in self.runs if seeds is None or run["seed"] in seeds]
        return np.array([[run[panel]["won"][task] for task in sorted(run[panel]["won"])] for run in runs])

    @property
    def success(self) -> Estimate:
        """Success on the test panel, with the interval over seeds and tasks."""
        return estimate_crossed(self.table().tolist())


def read_arms(scenario: Scenario, results: Path) -> list[ArmResult]:
    """Arms of which at least one seed is recorded, in the order of the scenario."""
    found = []
    for arm, rate in choose_rates(results, scenario).items():
        runs = [read_result(results, scenario, trial.name) for trial in scenario.list_reported(arm, rate)]
        recorded = [run for run in runs if run is not None]
        if recorded:
            found.append(ArmResult(arm, rate, recorded))
    return found


def compare_with_start(start: Mapping[str, float], arm: ArmResult) -> Estimate:
    """Mean of an arm's success minus the warm start's, with the interval over seeds and tasks.

    Raises:
        ValueError: the two are not on the same tasks.
    """
    if start.keys() != arm.won().keys():
        raise ValueError("the results are not on the same tasks")
    return estimate_crossed((arm.table() - np.array([start[task] for task in sorted(start)])).tolist())


@dataclass(frozen=True)
class Beside:
    """An arm beside the one without self-imitation: that one, the seeds that both have, and the paired difference.

    ``difference`` has the interval over seeds and tasks, ``tasks_alone`` the one over tasks, which speaks of these runs
    only.
    """

    base: ArmResult
    seeds: list[int]
    difference: Estimate
    tasks_alone: Estimate


def compare_arms(arms: Sequence[ArmResult], arm: ArmResult) -> Beside | None:
    """An arm beside its base.

    Returns None where there is no such arm, or no seed in common: other seeds would compare luck.
    """
    base = next((other for other in arms if other.arm == BASES.get(arm.arm)), None)
    if base is None:
        return None
    seeds = [seed for seed in arm.seeds if seed in base.seeds]
    if not seeds:
        return None
    steps = arm.table(seeds) - base.table(seeds)
    return Beside(base, seeds, estimate_crossed(steps.tolist()), estimate_difference(steps.mean(0).tolist()))


def pool_seeds(scenarios: Iterable[Sequence[ArmResult]], arm: str, base: str, panel: str | None) -> list[float]:
    """Differences of an arm and its base, one a pair of runs of one seed, over all scenarios that have both.

    Args:
        scenarios: the arms of each.
        arm, base: names of the two.
        panel: ``test_panel`` or ``valid_panel``; None for the rollouts of the second half of the training.
    """
    found = []
    for arms in scenarios:
        pair = [next((each for each in arms if each.arm == name), None) for name in (arm, base)]
        if pair[0] is None or pair[1] is None:
            continue
        means: list[dict[int, float]] = []
        for result in (pair[0], pair[1]):
            values = {}
            for run in result.runs:
                rollouts = run["curves"]["success"]
                values[run["seed"]] = run[panel]["mean"] if panel else fmean(rollouts[len(rollouts) // 2 :])
            means.append(values)
        found += [means[0][seed] - means[1][seed] for seed in sorted(means[0].keys() & means[1].keys())]
    return found
