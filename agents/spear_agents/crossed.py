"""Differences between two ways of training, with intervals over seeds and tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from spear_agents.statistics import (
    Comparison,
    Estimate,
    Metric,
    average_by_task,
    compare_trajectories,
    estimate_difference,
    plain_estimate,
)
from spear_agents.trajectory import Trajectory
from spear_envs.core.errors import SpearError

CONFIDENCE = 0.95
POWER = 0.8


def estimate_crossed(values: Sequence[Sequence[float]]) -> Estimate:
    """Mean of a table [seeds, tasks], with the interval of a two-way random-effects model.

    Seeds and tasks are both random samples: the variance of the mean is that of seeds over their number, of tasks over
    theirs, and of the residual over both. Degrees of freedom are Satterthwaite's, from the mean squares, which gives a
    wide interval if a component is estimated below 0. With one seed the interval is over tasks. Raises ValueError for
    an empty table, or rows of unequal length.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"expected a table of seeds by tasks, got shape {table.shape}")
    seeds, tasks = table.shape
    if seeds == 1 or tasks == 1:
        return estimate_difference(table.mean(0).tolist()) if tasks > 1 else estimate_over_seeds(table[:, 0].tolist())
    mean = float(table.mean())
    by_seed, by_task = table.mean(1) - mean, table.mean(0) - mean
    of_seeds = tasks * float((by_seed**2).sum()) / (seeds - 1)
    of_tasks = seeds * float((by_task**2).sum()) / (tasks - 1)
    rest = table - mean - by_seed[:, None] - by_task[None, :]
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (tasks - 1))
    size = seeds * tasks
    variance = (max(0.0, of_seeds - of_rest) + max(0.0, of_tasks - of_rest) + of_rest) / size
    if not variance:
        return estimate_difference(table.mean(0).tolist())
    squares = of_seeds**2 / (seeds - 1) + of_tasks**2 / (tasks - 1) + of_rest**2 / ((seeds - 1) * (tasks - 1))
    freedom = max(1.0, max(of_seeds + of_tasks - of_rest, 0.0) ** 2 / squares)
    half = _quantile(freedom) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half, tasks)


def estimate_over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds, with Student's interval; infinite for one seed or equal values. Raises ValueError without."""
    if not values:
        raise ValueError("there are no seeds to average over")
    mean, count = fmean(values), len(values)
    spread = float(np.std(values, ddof=1)) if count > 1 else 0.0
    half = _quantile(count - 1) * spread / math.sqrt(count) if spread else math.inf
    return Estimate(mean, mean - half, mean + half, count)


def _quantile(freedom: float) -> float:
    from scipy.stats import t  # late: half a second

    return float(t.ppf(0.5 + CONFIDENCE / 2, freedom))


def count_pairs(deviation: float, difference: float) -> int:
    """Number of pairs of runs that detect a true difference with 80 % power in a two-sided t test at 5 %.

    ``deviation`` is that of the difference between the runs of a pair, ``difference`` the true mean difference. Raises
    ValueError for a difference of 0 or a negative deviation.
    """
    if not difference or deviation < 0:
        raise ValueError(f"a deviation of {deviation} and a difference of {difference}: give >= 0, and not 0")
    from scipy.stats import nct, t

    for pairs in range(2, 1_000_000):
        shift = abs(difference) / deviation * math.sqrt(pairs) if deviation else math.inf
        limit = t.ppf(0.5 + CONFIDENCE / 2, pairs - 1)
        if math.isinf(shift) or nct.sf(limit, pairs - 1, shift) >= POWER:
            return pairs
    raise ValueError(f"a difference of {difference} is lost in a deviation of {deviation}")


@dataclass(frozen=True)
class CrossedComparison:
    """Pairs of runs, each of one seed, on the same tasks.

    ``difference`` is the mean of after - before, with the interval over seeds and tasks, ``tasks_alone`` the same mean
    with the interval over tasks, which describes these runs only, and ``by_seed`` the mean difference of each pair.
    """

    before: Estimate
    after: Estimate
    difference: Estimate
    tasks_alone: Estimate
    by_seed: tuple[float, ...]
    pairs: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "before": plain_estimate(self.before),
            "after": plain_estimate(self.after),
            "difference": plain_estimate(self.difference),
            "difference_over_tasks_alone": plain_estimate(self.tasks_alone),
            "by_seed": list(self.by_seed),
            "pairs": [pair.to_json() for pair in self.pairs],
        }


def compare_pairs(
    pairs: Sequence[tuple[Iterable[Trajectory], Iterable[Trajectory]]], metric: Metric = Metric.SUCCESS
) -> CrossedComparison:
    """Compare pairs of runs over the tasks that all share. Raises SpearError for no such task, or several task sets."""
    listed = [(list(before), list(after)) for before, after in pairs]
    prints = {trajectory.fingerprint for pair in listed for run in pair for trajectory in run}
    if len(prints) > 1:
        raise SpearError(f"the pairs are on different task sets ({len(prints)} fingerprints): evaluate all on one.")
    averages = [[average_by_task(run, metric) for run in pair] for pair in listed]
    shared = [task for task in averages[0][0] if all(task in run for pair in averages for run in pair)]
    if not shared:
        raise SpearError("the runs share no task: evaluate all of them on the same tasks.")
    before, after = ([[pair[which][task] for task in shared] for pair in averages] for which in (0, 1))
    steps = (np.asarray(after) - np.asarray(before)).tolist()
    return CrossedComparison(
        before=estimate_crossed(before).clip(),
        after=estimate_crossed(after).clip(),
        difference=estimate_crossed(steps),
        tasks_alone=estimate_difference(np.mean(steps, axis=0).tolist()),
        by_seed=tuple(fmean(row) for row in steps),
        pairs=tuple(compare_trajectories(*pair, metric) for pair in listed),
    )
