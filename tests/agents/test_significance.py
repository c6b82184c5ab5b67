from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_agents.significance import (
    compute_permutation_p,
    compute_sign_p,
    explain_comparison,
    judge_comparison,
)
from spear_agents.statistics import Comparison, Estimate, estimate_mean


def compare(steps: list[float], unshared: int = 0) -> Comparison:
    whole = estimate_mean([0.5] * len(steps))
    mean = math.fsum(steps) / len(steps)
    return Comparison(
        whole,
        whole,
        Estimate(mean, mean, mean, len(steps)),
        sum(step > 0 for step in steps),
        sum(step < 0 for step in steps),
        tuple(steps),
        unshared,
    )


def flip_all(steps: list[float]) -> float:
    """The permutation test by brute force, in exact arithmetic."""
    exact = [Fraction(step).limit_denominator(1000) for step in steps if step]
    seen = abs(sum(exact))
    flips = list(itertools.product((1, -1), repeat=len(exact)))
    return sum(abs(sum(s * x for s, x in zip(signs, exact, strict=True))) >= seen for signs in flips) / len(flips)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9))
def test_the_permutation_test_counts_every_flip(pairs: list[tuple[int, int]]) -> None:
    steps = [a / 6 - b / 6 for a, b in pairs]
    p, exact = compute_permutation_p(steps)
    assert exact
    assert p == pytest.approx(flip_all(steps), abs=1e-12)


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_sign_test_is_the_binomial_one(gained: int, lost: int) -> None:
    p = compute_sign_p(gained, lost)
    count = gained + lost
    at_most = [math.comb(count, i) / 2**count for i in range(count + 1)]
    brute = sum(chance for i, chance in enumerate(at_most) if abs(2 * i - count) >= abs(gained - lost))
    assert p == pytest.approx(min(1.0, brute))
    assert p == compute_sign_p(lost, gained)


def test_shares_of_won_tasks_give_the_same_p_in_both_tests() -> None:
    assert compute_sign_p(12, 0) == pytest.approx(2 / 2**12)
    assert compute_permutation_p([1.0] * 12 + [0.0] * 88)[0] == pytest.approx(2 / 2**12)
    assert compute_permutation_p([0.0] * 10) == (1.0, True)


def test_scores_without_a_common_unit_are_drawn() -> None:
    dice = np.random.default_rng(0)
    steps = dice.normal(0.1, 0.3, 80).tolist()
    p, exact = compute_permutation_p(steps)
    assert not exact and 0 < p < 0.05
    assert compute_permutation_p(steps) == (p, exact)
    small = dice.normal(0.02, 0.3, 12).tolist()
    signs = np.array(list(itertools.product((1, -1), repeat=12)))
    whole = float((np.abs(signs @ np.abs(small)) >= abs(sum(small)) - 1e-12).mean())
    assert compute_permutation_p(small)[0] == pytest.approx(whole, abs=0.02)


def test_chance_is_called_a_difference_about_as_often_as_it_should() -> None:
    dice = np.random.default_rng(2)
    steps = [(dice.integers(0, 5, 40) / 4 - dice.integers(0, 5, 40) / 4).tolist() for _ in range(400)]
    rejected = np.mean([compute_permutation_p(found)[0] < 0.05 for found in steps])
    assert 0.02 < rejected < 0.08


def test_words_say_what_is_shown_and_what_is_not() -> None:
    clear = compare([1.0] * 20 + [0.0] * 20)
    (first, *_) = explain_comparison(clear, judge_comparison(clear), "old", "new")
    assert first.startswith("new is better than old by 50.0 points")
    worse = compare([-1.0] * 20 + [0.0] * 20)
    assert explain_comparison(worse, judge_comparison(worse), "old", "new")[0].startswith("old is better than new")
    unclear = compare([1.0] * 5 + [-1.0] * 4 + [0.0] * 31, unshared=3)
    judgement = judge_comparison(unclear)
    said = " ".join(explain_comparison(unclear, judgement, "old", "new"))
    assert "No difference is shown" in said and "does not prove" in said and "3 tasks were left out" in said
    assert judgement.tasks_needed is not None and judgement.tasks_needed > 1000
    assert f"{judgement.tasks_needed:,} tasks" in said
    same = compare([0.0] * 5)
    assert "equally well" in explain_comparison(same, judge_comparison(same), "a", "b")[0]
    assert judge_comparison(compare([1.0])).detectable is None


def test_the_tasks_needed_would_show_the_difference_four_times_in_five() -> None:
    dice = np.random.default_rng(5)
    pilot = compare((dice.random(400) < 0.3).astype(float).tolist() + [-1.0] * 60)
    needed = judge_comparison(pilot).tasks_needed
    assert needed is not None
    values = np.array(pilot.steps)
    shown = []
    for _ in range(300):
        drawn = values[dice.integers(0, len(values), needed)]
        shown.append(compute_permutation_p(drawn.tolist())[0] < 0.05)
    assert 0.7 < np.mean(shown) < 0.9
