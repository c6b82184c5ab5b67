from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.statistics import average_by_task, compare_trajectories, estimate_mean, summarise
from agents.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError
from tests.agents.test_trajectory import make_trajectory


def episode(task: str, won: bool, subtask: str = "s", **changes: object) -> Trajectory:
    stop = StopReason.WON if won else StopReason.TURN_LIMIT
    made = make_trajectory(task_id=task, subtask=subtask, won=won, score=float(won), stop=stop)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_interval_is_the_normal_one_over_tasks() -> None:
    values = [0.0, 0.5, 1.0, 1.0]
    found = estimate_mean(values)
    half = 1.959964 * np.std(values, ddof=1) / 2
    assert (found.mean, found.tasks) == (0.625, 4)
    assert found.half == pytest.approx(half, rel=1e-6)
    assert found.low == pytest.approx(0.625 - half, rel=1e-6)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    dice = np.random.default_rng(0)
    covered = [
        (found := estimate_mean((dice.random(200) < 0.35).astype(float).tolist())).low <= 0.35 <= found.high
        for _ in range(2000)
    ]
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_unanimous_tasks_still_leave_doubt(value: float) -> None:
    found = estimate_mean([value] * 20)
    assert (found.low, found.high) == pytest.approx((0.0, 0.1611) if value == 0 else (0.8389, 1.0), abs=1e-4)


def test_one_task_says_nothing_about_the_others() -> None:
    assert estimate_mean([0.5]).half == math.inf
    with pytest.raises(ValueError, match="no tasks"):
        estimate_mean([])


def test_samples_are_averaged_within_their_task_first() -> None:
    every = [episode("a", True), episode("a", True), episode("a", False), episode("b", False)]
    assert average_by_task(every) == {"a": pytest.approx(2 / 3), "b": 0.0}
    overall, _ = summarise(every)
    assert overall.success is not None
    assert overall.success.mean == pytest.approx(1 / 3)
    assert overall.stops == {"won": 2, "turn_limit": 2}


def test_subtasks_are_apart_in_natural_order_and_faults_left_out() -> None:
    every = [
        episode("a", True, "len10+"),
        episode("b", False, "len7-9"),
        episode("c", False, "len7-9", stop=StopReason.FAULT, fault="down"),
        episode("d", False, "broken", stop=StopReason.FAULT, fault="down"),
    ]
    overall, parts = summarise(every)
    assert list(parts) == ["broken", "len7-9", "len10+"]
    assert (overall.episodes, overall.faults) == (2, 2)
    assert parts["broken"].success is None
    assert parts["len7-9"].success is not None and parts["len7-9"].success.tasks == 1
    assert parts["broken"].to_json()["success"] is None


def test_format_and_action_are_counted_by_turn() -> None:
    good = episode("a", True)
    bad = replace(
        good, turns=tuple(replace(turn, format_ok=i > 0, action_ok=False) for i, turn in enumerate(good.turns))
    )
    overall, _ = summarise([good, bad])
    assert overall.format_ok == 0.75
    assert overall.action_ok == 0.5
    assert overall.turns == 2


def test_the_paired_difference_is_tighter_than_two_intervals() -> None:
    dice = np.random.default_rng(1)
    hard = dice.random(200)
    before = [episode(str(i), bool(dice.random() < x)) for i, x in enumerate(hard) for _ in range(8)]
    after = [episode(str(i), bool(dice.random() < min(1, x + 0.15))) for i, x in enumerate(hard) for _ in range(8)]
    found = compare_trajectories(before, after)
    assert found.difference.mean == pytest.approx(found.after.mean - found.before.mean)
    assert found.difference.half < min(found.before.half, found.after.half)
    assert found.difference.low > 0.08
    assert found.gained > found.lost
    assert found.to_json()["gained_tasks"] == found.gained


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=20))
def test_turning_the_comparison_round_turns_its_sign(outcomes: list[tuple[bool, bool]]) -> None:
    first = [episode(str(i), a) for i, (a, _) in enumerate(outcomes)]
    second = [episode(str(i), b) for i, (_, b) in enumerate(outcomes)]
    there, back = compare_trajectories(first, second), compare_trajectories(second, first)
    assert there.difference.mean == pytest.approx(-back.difference.mean)
    assert (there.gained, there.lost) == (back.lost, back.gained)
    assert there.separate == back.separate


def test_runs_on_other_tasks_are_not_compared() -> None:
    with pytest.raises(SpearError, match="fingerprints"):
        compare_trajectories([episode("a", True)], [episode("a", True, fingerprint="other")])
    with pytest.raises(SpearError, match="share no task"):
        compare_trajectories([episode("a", True)], [episode("b", True)])
