"""Significance and power of a paired difference between two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np

from spear_agents.statistics import Comparison

ALPHA = 0.05
POWER = 0.8
RESAMPLES = 10_000
_SAMPLES_AT_MOST = 10_000
"""Largest denominator of a share of won samples."""
_CELLS_AT_MOST = 2_000_000
"""Longest exact distribution; beyond it the permutation test samples."""


@dataclass(frozen=True)
class Judgement:
    """Tests of a comparison.

    ``sign_p`` is of a two-sided exact sign test (gained against lost tasks), ``permutation_p`` of a two-sided paired
    permutation test on the mean difference (signs of the tasks flipped; ``exact`` if all flips were counted).
    ``detectable`` is the smallest true difference that this many tasks detect with 80 % power (None if the tasks do not
    differ), and ``tasks_needed`` the tasks that detect this one (None if it is 0).
    """

    sign_p: float
    permutation_p: float
    exact: bool
    detectable: float | None
    tasks_needed: int | None

    @property
    def significant(self) -> bool:
        """Whether the permutation test rejects chance at 5 %."""
        return self.permutation_p < ALPHA

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"significant": self.significant, "alpha": ALPHA, "power": POWER}


def judge_comparison(comparison: Comparison, seed: int = 0) -> Judgement:
    """Test the paired differences of ``comparison``; ``seed`` is that of drawn permutations."""
    steps = comparison.steps
    permutation_p, exact = compute_permutation_p(steps, seed)
    count = len(steps)
    spread = stdev(steps) if count > 1 else None
    factor = NormalDist().inv_cdf(1 - ALPHA / 2) + NormalDist().inv_cdf(POWER)
    mean = fmean(steps)
    needed = max(2, math.ceil((factor * spread / mean) ** 2)) if spread is not None and mean else None
    return Judgement(
        sign_p=compute_sign_p(comparison.gained, comparison.lost),
        permutation_p=permutation_p,
        exact=exact,
        detectable=None if not spread else factor * spread / math.sqrt(count),
        tasks_needed=needed,
    )


def compute_sign_p(gained: int, lost: int) -> float:
    """Two-sided p of ``gained`` against ``lost`` tasks under Binomial(gained + lost, 1/2); ties do not count."""
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**count)))


def compute_permutation_p(steps: Sequence[float], seed: int = 0) -> tuple[float, bool]:
    """Two-sided p of |sum of steps| when each step's sign is a fair coin, and whether it is exact.

    Shares with a common denominator are counted as integers, and the distribution of their signed sum is built task by
    task. Other values (scores) are flipped 10,000 times, with p = (hits + 1) / (draws + 1).
    """
    sizes = [abs(step) for step in steps if step]
    if not sizes:
        return 1.0, True
    units = _count_units(sizes)
    if units is not None:
        total = sum(units)
        chances = np.zeros(2 * total + 1)
        chances[total] = 1.0
        for unit in units:
            chances = (np.roll(chances, unit) + np.roll(chances, -unit)) / 2
        seen = abs(sum(unit if step > 0 else -unit for unit, step in zip(units, filter(None, steps), strict=True)))
        sums = np.abs(np.arange(-total, total + 1))
        return float(min(1.0, chances[sums >= seen].sum())), True
    dice = np.random.default_rng(seed)
    values = np.array(sizes)
    observed = abs(sum(steps))
    hits = 0
    for _ in range(RESAMPLES // 100):
        signs = dice.integers(0, 2, (100, len(values))) * 2 - 1
        hits += int((np.abs(signs @ values) >= observed - 1e-12).sum())
    return (hits + 1) / (RESAMPLES + 1), False


def _count_units(sizes: Sequence[float]) -> list[int] | None:
    """The sizes as multiples of a common unit; None if there is none or the distribution would be too long."""
    shares = [Fraction(size).limit_denominator(_SAMPLES_AT_MOST) for size in sizes]
    if any(abs(float(share) - size) > 1e-12 for share, size in zip(shares, sizes, strict=True)):
        return None
    unit = math.lcm(*(share.denominator for share in shares))
    units = [int(share * unit) for share in shares]
    return units if sum(units) * len(units) <= 50 * _CELLS_AT_MOST and sum(units) <= _CELLS_AT_MOST else None


def explain_comparison(comparison: Comparison, judgement: Judgement, before: str, after: str) -> list[str]:
    """Explain the figures in sentences."""
    points = 100 * comparison.difference.mean
    count = len(comparison.steps)
    p = f"p = {judgement.permutation_p:.2g}"
    sentences = []
    if not any(comparison.steps):
        sentences.append(f"The two runs did equally well on each of the {count} tasks.")
    elif judgement.significant:
        better, worse = (after, before) if points > 0 else (before, after)
        sentences.append(
            f"{better} is better than {worse} by {abs(points):.1f} points ({p}): so large a difference would seldom "
            "be chance."
        )
    else:
        sentences.append(
            f"No difference is shown: {points:+.1f} points ({p}) may well be chance. This does not prove that the two "
            "are equal."
        )
    if judgement.detectable is not None:
        sentences.append(
            f"These {count} tasks show a true difference of {100 * judgement.detectable:.1f} points 4 times in 5."
        )
    if not judgement.significant and judgement.tasks_needed is not None:
        sentences.append(
            f"To show a true difference of {abs(points):.1f} points that often, about {judgement.tasks_needed:,} tasks "
            "would be needed."
        )
    if comparison.unshared:
        sentences.append(f"{comparison.unshared} tasks were left out, because only one of the runs played them.")
    return sentences
