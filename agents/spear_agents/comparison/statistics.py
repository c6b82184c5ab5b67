"""Success rates with confidence intervals, by task and by subtask, and the paired comparison of two runs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean, pvariance, stdev
from typing import Any

from spear_agents.play.trajectory import StopReason, TokenKind, Trajectory
from spear_envs.core.errors import SpearError

_Z95 = 1.959963984540054
ROUNDED = 1e-20
"""Variance of values in [-1, 1] below which they differ by rounding alone, as means of equal thirds do."""
ROUNDING = 1e-12
"""Largest difference of shares or scores that may be 0, but for the rounding of floats."""
_DIGITS = 4000
"""Characters of a name's number that sort it; Python reads no longer ones."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    tasks: int

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def clip(self) -> Estimate:
        """Clip the interval of a rate to [0, 1]."""
        return Estimate(self.mean, max(0.0, self.low), min(1.0, self.high), self.tasks)


def estimate_mean(per_task: Sequence[float]) -> Estimate:
    """Return the mean over tasks of a rate or score in [0, 1], with Wilson's score interval.

    Tasks are the independent units: samples of one task are averaged first. With one sample per task the values are 0
    or 1 and the interval is Wilson's for that many trials. Otherwise the effective trials are n · p(1 - p) / s² with s²
    the variance over tasks: the number of independent trials that would give the same uncertainty (Franco et al. 2019,
    "Comparative study of confidence intervals for proportions in complex sample surveys"). If all tasks agree, s is
    unknown and each counts as one trial.

    Raises ValueError without tasks, SpearError for a value outside [0, 1].
    """
    if not per_task:
        raise ValueError("a mean over no tasks")
    if wrong := next((value for value in per_task if not 0.0 <= value <= 1.0), None):
        raise SpearError(f"a score of {wrong:g} is outside [0, 1]: spear check finds the fault of its environment")
    mean, trials = _count_trials(per_task)
    shrink = 1 + _Z95**2 / trials
    centre = (mean + _Z95**2 / (2 * trials)) / shrink
    half = _Z95 * math.sqrt(mean * (1 - mean) / trials + (_Z95 / (2 * trials)) ** 2) / shrink
    # Rounding must not move the bounds off 0 or 1, or past the mean.
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)), len(per_task))


def _count_trials(per_task: Sequence[float]) -> tuple[float, float]:
    """Return the mean of rates, and the number of independent trials that would give the same uncertainty."""
    mean, spread = fmean(per_task), pvariance(per_task)
    return mean, len(per_task) * mean * (1 - mean) / spread if spread > ROUNDED else len(per_task)


def estimate_amount(per_task: Sequence[float]) -> Estimate:
    """Return the mean over tasks of an amount such as a number of tokens, with Student's interval cut at 0.

    The quantile is that of the expansion 26.7.5 of Abramowitz and Stegun, within 1 % from three tasks on. The bounds
    are 0 and infinity for a single task, or equal values. Raises ValueError without tasks.
    """
    if not per_task:
        raise ValueError("a mean over no tasks")
    found = estimate_with_student(per_task, _find_quantile)
    return replace(found, low=max(0.0, found.low))


def estimate_with_student(values: Sequence[float], quantile: Callable[[int], float]) -> Estimate:
    """Return the mean with Student's interval, whose ``quantile`` depends on the degrees of freedom.

    The interval is infinite for a single value, or equal ones.
    """
    mean, count = fmean(values), len(values)
    spread = stdev(values) if count > 1 else 0.0
    half = quantile(count - 1) * spread / math.sqrt(count) if spread**2 > ROUNDED else math.inf
    return Estimate(mean, mean - half, mean + half, count)


def _find_quantile(freedom: int) -> float:
    z = _Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


@dataclass(frozen=True)
class Part:
    """Figures of one subtask or of all. Episodes with a fault count in ``faults`` only.

    Attributes:
        success: share of episodes won, over tasks (mean@k with k samples per task).
        score: mean of the benchmark's own score.
        scores: the same over tasks, with its interval.
        pass_at: by k the probability that one of k samples of a task wins, see :func:`estimate_pass_at`.
        turns: mean number of turns.
        format_ok: share of well-formed turns.
        action_ok: share of turns whose action had an effect.
        stops: number of episodes by stop reason.
        tool_calls: mean number of tool calls of an episode, over tasks.
        response_tokens: the same of the tokens that the policy wrote; None if they are not known, as of scripts. The
            estimate's tasks are those with an episode whose tokens are.
    """

    success: Estimate | None
    score: float
    turns: float
    format_ok: float
    action_ok: float
    episodes: int
    faults: int
    stops: Mapping[str, int]
    scores: Estimate | None
    pass_at: Mapping[int, Estimate]
    tool_calls: Estimate | None
    response_tokens: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        estimates = {name: getattr(self, name) for name in ("success", "scores", "tool_calls", "response_tokens")}
        return vars(self) | {
            **{name: found and plain_estimate(found) for name, found in estimates.items()},
            "stops": dict(self.stops),
            "pass_at": {str(k): plain_estimate(estimate) for k, estimate in self.pass_at.items()},
        }


def plain_estimate(estimate: Estimate) -> dict[str, float | int | None]:
    """Return the fields as plain values; None for bounds that are not finite."""
    bounds = {"ci95_low": estimate.low, "ci95_high": estimate.high}
    finite = {name: bound if math.isfinite(bound) else None for name, bound in bounds.items()}
    return {"mean": estimate.mean, **finite, "tasks": estimate.tasks}


def summarise(trajectories: Iterable[Trajectory]) -> tuple[Part, dict[str, Part]]:
    """Return the figures of all episodes and of each subtask, in the natural order of their names (9 before 10)."""
    every = list(trajectories)
    by_subtask: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in every:
        by_subtask[trajectory.subtask].append(trajectory)
    return _summarise_part(every), {
        name: _summarise_part(by_subtask[name]) for name in sorted(by_subtask, key=split_numbers)
    }


def split_numbers(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts names by the numbers in them, 9 before 10."""
    parts = (part[:_DIGITS] for part in re.split(r"(\d+)", name))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _summarise_part(trajectories: Sequence[Trajectory]) -> Part:
    valid = [t for t in trajectories if t.stop is not StopReason.FAULT]
    turns = [turn for t in valid for turn in t.turns]
    stops = dict.fromkeys((reason.value for reason in StopReason), 0)
    for trajectory in trajectories:
        stops[trajectory.stop.value] += 1
    return Part(
        success=estimate_mean(list(average_by_task(valid).values())) if valid else None,
        score=_average([t.score for t in valid]) if valid else 0.0,
        turns=len(turns) / len(valid) if valid else 0.0,
        format_ok=fmean(turn.format_ok for turn in turns) if turns else 0.0,
        action_ok=fmean(turn.action_ok for turn in turns) if turns else 0.0,
        episodes=len(valid),
        faults=len(trajectories) - len(valid),
        stops={reason: count for reason, count in stops.items() if count},
        scores=estimate_mean(list(average_by_task(valid, Metric.SCORE).values())) if valid else None,
        pass_at=_estimate_passes(valid),
        tool_calls=_estimate_amounts(valid, lambda trajectory: trajectory.tool_calls),
        response_tokens=_estimate_amounts(valid, count_response_tokens),
    )


def _estimate_amounts(
    trajectories: Iterable[Trajectory], measure: Callable[[Trajectory], int | None]
) -> Estimate | None:
    """Return the mean over tasks of an amount, where it is known."""
    values: dict[str, list[int]] = defaultdict(list)
    for trajectory in trajectories:
        if (amount := measure(trajectory)) is not None:
            values[trajectory.task_id].append(amount)
    return estimate_amount([fmean(found) for found in values.values()]) if values else None


def count_response_tokens(trajectory: Trajectory) -> int | None:
    """Count the tokens that the policy wrote in an episode: the record's, or a server's own counts; None if unknown."""
    total = 0
    for turn in trajectory.turns:
        if turn.served is not None:
            written = turn.served.completion_tokens
        else:
            written = None if trajectory.tokens is TokenKind.BYTES else len(turn.response_ids)
        if written is None:
            return None
        total += written
    return total


class Metric(str, Enum):
    """Measure of an episode."""

    SUCCESS = "success"
    """1 if it was won, else 0."""
    SCORE = "score"
    """The benchmark's own score in [0, 1]."""

    def of(self, trajectory: Trajectory) -> float:
        """Return the value of one episode."""
        return float(trajectory.won) if self is Metric.SUCCESS else trajectory.score


def average_by_task(trajectories: Iterable[Trajectory], metric: Metric = Metric.SUCCESS) -> dict[str, float]:
    """Return the mean over the episodes of each task, without faults."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.stop is not StopReason.FAULT:
            values[trajectory.task_id].append(metric.of(trajectory))
    return {task: _average(found) for task, found in values.items()}


def _average(values: Sequence[float]) -> float:
    """Return the mean, NaN if it is none, as of infinities and of the largest floats."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):
        return math.nan


def estimate_pass_at(samples: int, won: int, k: int) -> float:
    """Return the probability that ``k`` of a task's samples include a won one: 1 - C(n-c, k) / C(n, k).

    An unbiased estimate of 1 - (1 - p)^k, unlike 1 - (1 - c/n)^k (Chen et al. 2021, equation 1). Raises ValueError
    unless 1 <= k <= samples and 0 <= won <= samples.
    """
    if not 1 <= k <= samples or not 0 <= won <= samples:
        raise ValueError(f"pass@{k} of {won} won among {samples} samples: 1 <= k <= samples, 0 <= won <= samples")
    return 1.0 - math.comb(samples - won, k) / math.comb(samples, k)


def _estimate_passes(trajectories: Iterable[Trajectory]) -> dict[int, Estimate]:
    """Return pass@k for powers of two and the largest number of samples, over the tasks with k samples."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for trajectory in trajectories:
        counts[trajectory.task_id][0] += 1
        counts[trajectory.task_id][1] += trajectory.won
    most = max((samples for samples, _ in counts.values()), default=0)
    passes = {}
    for k in sorted({2**i for i in range(most.bit_length())} | {most}):
        if k:
            passes[k] = estimate_mean([estimate_pass_at(n, won, k) for n, won in counts.values() if n >= k])
    return passes


def average_parts(parts: Iterable[Part]) -> Estimate | None:
    """Return the unweighted mean of the parts' success; None if a part has none.

    The parts are treated as independent: the half width is sqrt(sum of squares) / m. ``tasks`` is the sum over parts.
    """
    found = [part.success for part in parts]
    if not found or any(success is None for success in found):
        return None
    every = [success for success in found if success is not None]
    mean = fmean(success.mean for success in every)
    half = math.sqrt(sum(success.half**2 for success in every)) / len(every)
    return Estimate(mean, mean - half, mean + half, sum(success.tasks for success in every)).clip()


def estimate_outcomes(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the success over tasks, of whose samples the mean counts."""
    return estimate_mean([sum(wins) / len(wins) for wins in outcomes.values()])


def format_percent(estimate: Estimate) -> str:
    """Return the mean and interval in percent."""
    return f"{100 * estimate.mean:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same tasks: the success of either, and the mean over tasks of after - before (``steps``), paired.

    The second run won more often on ``gained`` tasks, less often on ``lost`` ones. ``unshared`` tasks are in one run
    only.
    """

    before: Estimate
    after: Estimate
    difference: Estimate
    gained: int
    lost: int
    steps: tuple[float, ...] = ()
    unshared: int = 0

    @property
    def separate(self) -> bool:
        """Whether the two intervals do not overlap."""
        return self.before.high < self.after.low or self.after.high < self.before.low

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "before": plain_estimate(self.before),
            "after": plain_estimate(self.after),
            "difference": plain_estimate(self.difference),
            "gained_tasks": self.gained,
            "lost_tasks": self.lost,
            "intervals_separate": self.separate,
            "unshared_tasks": self.unshared,
        }


def compare_trajectories(
    before: Iterable[Trajectory], after: Iterable[Trajectory], metric: Metric = Metric.SUCCESS
) -> Comparison:
    """Compare two runs over the tasks they share. Raises SpearError if there is none, or their task sets differ."""
    first, second = list(before), list(after)
    prints = {t.fingerprint for t in first} | {t.fingerprint for t in second}
    if len(prints) > 1:
        raise SpearError(f"the runs are not on the same task set ({', '.join(sorted(p[:12] for p in prints))})")
    old, new = average_by_task(first, metric), average_by_task(second, metric)
    shared = [task for task in old if task in new]
    if not shared:
        raise SpearError("the runs do not share a task: evaluate both on the same tasks")
    # The mean of three scores of 0.1 is not 0.1, which must not count as a gain.
    steps = tuple(step if abs(step := new[task] - old[task]) > ROUNDING else 0.0 for task in shared)
    return Comparison(
        before=estimate_mean([old[task] for task in shared]),
        after=estimate_mean([new[task] for task in shared]),
        difference=estimate_difference(steps),
        gained=sum(step > 0 for step in steps),
        lost=sum(step < 0 for step in steps),
        steps=steps,
        unshared=len(old.keys() ^ new.keys()),
    )


def estimate_difference(steps: Sequence[float]) -> Estimate:
    """Return the mean over tasks of paired differences in [-1, 1], with a score interval.

    The difference is that of two means in [0, 1], what was gained and what was lost. Their intervals (Wilson's with the
    correction for continuity, so that they have a width at the edges) are combined with their correlation, as by
    Newcombe (1998, "Interval estimation for the difference between independent proportions", method 10 for pairs). The
    coverage is 95 % or more from 24 tasks on.
    """
    if wrong := next((step for step in steps if not -1.0 <= step <= 1.0), None):
        raise SpearError(f"a difference of {wrong:g} is outside [-1, 1]")
    gained, lost = [max(0.0, step) for step in steps], [max(0.0, -step) for step in steps]
    (up, up_low, up_high), (down, down_low, down_high) = _correct(gained), _correct(lost)
    spreads = pvariance(gained), pvariance(lost)
    # No task is both gained and lost.
    common = -up * down / math.sqrt(math.prod(spreads)) if min(spreads) > ROUNDED else 0.0
    mean = fmean(steps)

    def combine(first: float, second: float) -> float:
        return math.sqrt(max(0.0, first**2 + second**2 - 2 * common * first * second))

    low, high = mean - combine(up - up_low, down_high - down), mean + combine(up_high - up, down - down_low)
    return Estimate(mean, max(-1.0, low), min(1.0, high), len(steps))


def _correct(per_task: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of rates and Wilson's interval with the correction for continuity."""
    mean, trials = _count_trials(per_task)
    scale, centre = 2 * (trials + _Z95**2), 2 * trials * mean + _Z95**2

    def reach(sign: int) -> float:
        inner = _Z95**2 - 1 / trials + 4 * trials * mean * (1 - mean) + sign * (4 * mean - 2)
        return 1 + _Z95 * math.sqrt(max(0.0, inner))

    low = 0.0 if mean <= 0 else max(0.0, (centre - reach(1)) / scale)
    high = 1.0 if mean >= 1 else min(1.0, (centre + reach(-1)) / scale)
    return mean, min(mean, low), max(mean, high)
