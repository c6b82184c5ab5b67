import math

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the extra 'stats'")

from scipy.stats import t as student
from scipy.stats import ttest_1samp

from spear_agents.comparison.significance import (
    compare_pairs,
    count_pairs,
    estimate_crossed,
    estimate_over_seeds,
    explain_pairs,
)
from spear_agents.comparison.statistics import estimate_difference
from spear_envs.core.errors import SpearError
from tests.agents.test_statistics import episode


def test_intervals_over_seeds_and_tasks_cover_the_truth() -> None:
    dice = np.random.default_rng(0)
    alone = crossed = 0
    for _ in range(400):
        table = dice.normal(0, 0.03, (3, 1)) + dice.normal(0, 0.2, (1, 100)) + dice.normal(0, 0.3, (3, 100))
        table = np.clip(table, -1, 1)
        found, narrow = estimate_crossed(table.tolist()), estimate_difference(table.mean(0).tolist())
        assert found.mean == pytest.approx(narrow.mean)
        crossed += found.low <= 0 <= found.high
        alone += narrow.low <= 0 <= narrow.high
    assert crossed >= 0.94 * 400 > 0.9 * 400 > alone, (crossed, alone)


def test_one_component_alone_is_the_textbook_interval() -> None:
    values = [0.1, 0.4, 0.2]
    expected = ttest_1samp(values, 0).confidence_interval()
    over_seeds = estimate_over_seeds(values)
    assert (over_seeds.low, over_seeds.high) == pytest.approx((expected.low, expected.high))
    only_seeds = estimate_crossed([[value] * 50 for value in values])
    assert (only_seeds.low, only_seeds.high) == pytest.approx((expected.low, expected.high))
    assert estimate_crossed([[0.0, 1.0, 1.0, 0.0]]) == estimate_difference([0.0, 1.0, 1.0, 0.0])
    for equal in ([[0.0] * 24], [[0.0] * 24] * 3, [[1.0] * 24] * 3, [[1 / 3] * 24] * 3, [[-0.1] * 24] * 5):
        assert 0.1 < estimate_crossed(equal).half < 0.3
    assert math.isinf(estimate_over_seeds([0.5, 0.5]).high)
    assert math.isinf(estimate_over_seeds([0.3 - 0.1, 0.2]).high), "they differ by rounding alone"
    assert math.isinf(estimate_over_seeds([0.5]).high)
    same = estimate_crossed([[0.5, 0.5], [0.5, 0.5]])
    assert same.low < 0.5 < same.high
    for wrong in ([], [[]], [1.0]):
        with pytest.raises(ValueError, match="seeds by tasks"):
            estimate_crossed(wrong)  # type: ignore[arg-type]


def test_the_interval_is_that_of_the_model_s_mean_squares() -> None:
    """By projections on the columns of seeds and tasks instead of marginal means."""
    dice = np.random.default_rng(3)
    for seeds, tasks in ((2, 5), (3, 12), (5, 20)):
        table = dice.integers(-1, 2, (seeds, tasks)).astype(float)
        values, freedoms = table.ravel(), (seeds - 1, tasks - 1, (seeds - 1) * (tasks - 1))
        columns = np.kron(np.eye(seeds), np.ones((tasks, 1))), np.kron(np.ones((seeds, 1)), np.eye(tasks))
        parts = [one @ np.linalg.pinv(one) @ values - values.mean() for one in columns]
        rest = values - values.mean() - parts[0] - parts[1]
        squares = [(part**2).sum() / freedom for part, freedom in zip((*parts, rest), freedoms, strict=True)]
        seed_variance, task_variance = (max(0.0, square - squares[2]) for square in squares[:2])
        error = math.sqrt((seed_variance + task_variance + squares[2]) / values.size)
        top = max(0.0, squares[0] + squares[1] - squares[2]) ** 2
        freedom = top / sum(square**2 / one for square, one in zip(squares, freedoms, strict=True))
        half = student.ppf(0.975, max(1.0, freedom)) * error
        found = estimate_crossed(table.tolist())
        assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half))


def test_the_number_of_pairs_is_that_of_the_t_test() -> None:
    # statsmodels' TTestPower().solve_power(0.5, alpha=0.05, power=0.8) is 33.4.
    assert count_pairs(2.0, 1.0) == 34
    assert count_pairs(2.0, -2.0) == 10
    assert count_pairs(0.0, 1.0) == count_pairs(1e-17, 0.5) == 2, "also where seeds differ by rounding alone"
    assert count_pairs(0.1, 0.0005) == pytest.approx((0.1 / 0.0005 * (1.959964 + 0.841621)) ** 2, rel=1e-3)
    assert count_pairs(0.1, 1e-6) is None
    with pytest.raises(ValueError, match="not 0"):
        count_pairs(1.0, 0.0)


def test_pairs_without_a_task_in_common_are_refused() -> None:
    with pytest.raises(SpearError, match="share no task"):
        compare_pairs([([], []), ([], [])])


def test_single_rates_stay_between_0_and_1() -> None:
    low, high = ([episode(str(task), won) for task in range(8)] for won in (False, True))
    most, few = [*high[:7], low[7]], [*low[:7], high[7]]
    found = compare_pairs([(low, high), (few, most), (low, most)])
    assert found.before.low == 0.0 < found.before.high < 1 and 0 < found.after.low < found.after.high == 1.0
    assert found.difference.mean == pytest.approx(found.after.mean - found.before.mean)
    assert "left out" not in " ".join(explain_pairs(found))


def test_tasks_that_one_pair_lacks_are_told() -> None:
    low, high = ([episode(str(task), won) for task in range(8)] for won in (False, True))
    found = compare_pairs([(low, high), (low[:6], high[:6])])
    assert found.difference.tasks == 6 and "left out" in " ".join(explain_pairs(found))
