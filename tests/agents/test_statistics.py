"""Intervals, pass@k, paired differences, and the tests of their significance."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_agents.comparison.significance import (
    adjust_p,
    compute_permutation_p,
    compute_sign_p,
    explain_comparison,
    judge_comparison,
)
from spear_agents.comparison.statistics import (
    Comparison,
    Estimate,
    Metric,
    average_by_task,
    average_parts,
    compare_trajectories,
    count_response_tokens,
    estimate_amount,
    estimate_difference,
    estimate_mean,
    estimate_pass_at,
    summarise,
)
from spear_agents.comparison.tables import describe_amounts
from spear_agents.engines.base import Served
from spear_agents.play.trajectory import StopReason, TokenKind, Trajectory
from spear_envs.core.errors import SpearError
from tests.agents.test_trajectory import make_trajectory


def episode(task: str, won: bool, subtask: str = "s", **changes: object) -> Trajectory:
    stop = StopReason.WON if won else StopReason.TURN_LIMIT
    made = make_trajectory(task_id=task, subtask=subtask, won=won, score=float(won), stop=stop)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_interval_of_one_sample_a_task_is_wilson_s() -> None:
    binomtest = pytest.importorskip("scipy.stats", reason="needs the extra 'stats'").binomtest
    for won, tasks in ((0, 20), (1, 20), (19, 20), (20, 20), (7, 30), (1, 1), (0, 1), (500, 1000)):
        found = estimate_mean([1.0] * won + [0.0] * (tasks - won))
        wanted = binomtest(won, tasks).proportion_ci(0.95, method="wilson")
        assert (found.mean, found.tasks) == (won / tasks, tasks)
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@given(st.lists(st.integers(0, 8).map(lambda won: won / 8), min_size=1, max_size=40))
def test_an_interval_of_a_rate_holds_it_and_stays_within_0_and_1(values: list[float]) -> None:
    found = estimate_mean(values)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.half > 0.01, "tasks that agree, one of them alone too, leave doubt"


@pytest.mark.parametrize(("truth", "samples"), [(0.35, 1), (0.03, 4), (0.5, 8)])
def test_the_interval_covers_the_truth_as_often_as_it_says(truth: float, samples: int) -> None:
    """Also where tasks differ, so that samples of one task are alike."""
    dice = np.random.default_rng(0)
    covered = 0
    for _ in range(1500):
        chances = dice.beta(truth * 2, (1 - truth) * 2, 150)
        found = estimate_mean((dice.binomial(samples, chances) / samples).tolist())
        covered += found.low <= truth <= found.high
    assert 0.925 < covered / 1500 < 0.975


def test_what_is_no_rate_has_no_interval() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        estimate_mean([])
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(SpearError, match=r"outside \[0, 1\]: spear check"):
            estimate_mean([0.5, wrong])


def test_samples_are_averaged_within_their_task_first() -> None:
    every = [episode("a", True), episode("a", True), episode("a", False), episode("b", False)]
    lost = [episode(task, False, stop=StopReason.FAULT, fault="down") for task in ("a", "c")]
    assert average_by_task([*every, *lost]) == {"a": pytest.approx(2 / 3), "b": 0.0}
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


def test_names_with_other_digits_have_an_order_too() -> None:
    names = ["a02", "a10", "a" + "9" * 5000, "a5\u00b2", "a\u0663"]
    _, parts = summarise([episode(name, True, name) for name in names])
    assert list(parts) == ["a02", "a\u0663", "a5\u00b2", "a10", "a" + "9" * 5000]


def test_format_and_action_are_counted_by_turn() -> None:
    good = episode("a", True)
    bad = replace(
        good, turns=tuple(replace(turn, format_ok=i > 0, action_ok=False) for i, turn in enumerate(good.turns))
    )
    overall, _ = summarise([good, bad])
    assert overall.format_ok == 0.75
    assert overall.action_ok == 0.5
    assert overall.turns == 2


def test_tool_calls_and_tokens_of_an_episode_are_averaged_by_task() -> None:
    model = episode("a", True, tool_calls=3)
    assert model.tokens is TokenKind.MODEL
    written = sum(len(turn.response_ids) for turn in model.turns)
    assert count_response_tokens(model) == written > 0
    served = [Served(completion_tokens=100), Served(completion_tokens=40)]
    turns = tuple(replace(turn, served=each) for turn, each in zip(model.turns, served, strict=True))
    api = episode("b", False, turns=turns, tokens=TokenKind.BYTES, tool_calls=0)
    uncounted = replace(api, turns=(turns[0], replace(turns[1], served=Served())))
    script = episode("b", False, tokens=TokenKind.BYTES, tool_calls=1)
    broken = episode("c", False, stop=StopReason.FAULT, fault="down", tool_calls=9)
    overall, _ = summarise([model, api, uncounted, script, broken])
    assert overall.tool_calls is not None and overall.response_tokens is not None
    assert (overall.tool_calls.mean, overall.tool_calls.tasks) == (pytest.approx((3 + 1 / 3) / 2), 2)
    assert (overall.response_tokens.mean, overall.response_tokens.tasks) == ((written + 140) / 2, 2)
    found = overall.to_json()
    assert found["tool_calls"]["ci95_low"] < found["tool_calls"]["mean"] < found["tool_calls"]["ci95_high"]
    shown = describe_amounts(overall)
    assert "1.67 tool calls [0.00, " in shown and f" {(written + 140) / 2:,.0f} response tokens [" in shown
    unknown, _ = summarise([script])
    assert unknown.response_tokens is None and describe_amounts(unknown) == "an episode has 1.00 tool calls"
    assert unknown.to_json()["response_tokens"] is None
    assert describe_amounts(summarise([broken])[0]) == ""


def test_the_interval_of_an_amount_is_student_s() -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs the extra 'stats'")
    dice = np.random.default_rng(5)
    for count in (3, 4, 8, 30, 1000):
        values = dice.gamma(2.0, 300.0, count).tolist()
        low, high = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
        found = estimate_amount(values)
        assert found.mean == pytest.approx((low + high) / 2)
        assert found.high - found.mean == pytest.approx((high - low) / 2, rel=0.01 if count < 5 else 1e-3)
        assert found.low == pytest.approx(max(0.0, low), abs=0.01 * (high - low))
    for alike in ([5.0], [2.0, 2.0]):
        assert (estimate_amount(alike).low, estimate_amount(alike).high) == (0.0, math.inf)
    with pytest.raises(ValueError, match="no tasks"):
        estimate_amount([])


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


@pytest.mark.parametrize(
    ("gained", "lost", "tied", "low", "high"),
    [(0, 0, 24, -0.172, 0.172), (24, 0, 0, 0.757, 1.0), (0, 24, 0, -1.0, -0.757), (8, 4, 12, -0.146, 0.443)],
)
def test_a_difference_has_an_interval_at_the_edges_too(
    gained: int, lost: int, tied: int, low: float, high: float
) -> None:
    found = estimate_difference([1.0] * gained + [-1.0] * lost + [0.0] * tied)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.001)


def test_the_interval_of_a_difference_covers_it_as_often_as_it_says() -> None:
    tasks, intervals = 24, {}
    for gained in range(tasks + 1):
        for lost in range(tasks + 1 - gained):
            steps = [1.0] * gained + [-1.0] * lost + [0.0] * (tasks - gained - lost)
            intervals[gained, lost] = estimate_difference(steps)
    for up, down in ((0.02, 0.02), (0.3, 0.1), (0.5, 0.45), (0.97, 0.01), (0.1, 0.0)):
        covered = sum(
            math.comb(tasks, a) * math.comb(tasks - a, b) * up**a * down**b * (1 - up - down) ** (tasks - a - b)
            for (a, b), found in intervals.items()
            if found.low <= up - down <= found.high
        )
        assert covered >= 0.949, (up, down)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=20))
def test_turning_the_comparison_round_turns_its_sign(outcomes: list[tuple[bool, bool]]) -> None:
    first = [episode(str(i), a) for i, (a, _) in enumerate(outcomes)]
    second = [episode(str(i), b) for i, (_, b) in enumerate(outcomes)]
    there, back = compare_trajectories(first, second), compare_trajectories(second, first)
    assert there.difference.mean == pytest.approx(-back.difference.mean)
    assert (there.gained, there.lost) == (back.lost, back.gained)
    assert there.separate == back.separate


def test_runs_on_other_tasks_are_not_compared() -> None:
    with pytest.raises(SpearError, match="same task set"):
        compare_trajectories([episode("a", True)], [episode("a", True, fingerprint="other")])
    with pytest.raises(SpearError, match="do not share a task"):
        compare_trajectories([episode("a", True)], [episode("b", True)])


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_won_sample(samples: int, data: st.DataObject) -> None:
    won, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    outcomes = [i < won for i in range(samples)]
    draws = list(itertools.combinations(outcomes, k))
    assert estimate_pass_at(samples, won, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 200), st.data())
def test_pass_at_k_grows_with_k_from_the_mean_to_any(samples: int, data: st.DataObject) -> None:
    won = data.draw(st.integers(0, samples))
    passes = [estimate_pass_at(samples, won, k) for k in range(1, samples + 1)]
    assert passes[0] == pytest.approx(won / samples)
    assert passes[-1] == (won > 0)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(passes))


@pytest.mark.parametrize(("samples", "won", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_needs_k_samples(samples: int, won: int, k: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        estimate_pass_at(samples, won, k)


def test_passes_are_over_the_tasks_that_have_the_samples() -> None:
    every = [episode("a", i == 0, seed=i) for i in range(6)] + [episode("b", False, seed=i) for i in range(6)]
    every[-1] = replace(every[-1], stop=StopReason.FAULT, fault="down")
    overall, _ = summarise(every)
    assert list(overall.pass_at) == [1, 2, 4, 6]
    assert (overall.pass_at[1].mean, overall.pass_at[1].tasks) == (pytest.approx(1 / 12), 2)
    assert (overall.pass_at[6].mean, overall.pass_at[6].tasks) == (1.0, 1)
    assert overall.to_json()["pass_at"]["2"]["mean"] == pytest.approx(1 / 6)


def test_scores_are_compared_where_asked() -> None:
    first, second = [episode("a", False, score=0.2)], [episode("a", False, score=0.7), episode("c", True)]
    found = compare_trajectories(first, second, Metric.SCORE)
    assert found.steps == (pytest.approx(0.5),) and found.unshared == 1
    assert compare_trajectories(first, second).steps == (0.0,)


def test_equal_scores_of_one_sample_and_of_several_do_not_differ() -> None:
    scores = {f"{i}": i / 20 for i in range(20)}
    first = [episode(task, False, score=score) for task, score in scores.items()]
    second = [episode(task, False, score=score, seed=k) for task, score in scores.items() for k in range(3)]
    found = compare_trajectories(first, second, Metric.SCORE)
    assert (found.gained, found.lost, set(found.steps)) == (0, 0, {0.0})
    assert "equally well" in explain_comparison(found, judge_comparison(found), "a", "b")[0]


def test_benchmarks_are_averaged_with_equal_weight() -> None:
    _, parts = summarise([episode(str(i), i % 2 == 0, "big") for i in range(100)] + [episode("x", True, "small")])
    found = average_parts(parts.values())
    assert found is not None and found.mean == 0.75 and found.tasks == 101
    assert average_parts([]) is None


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


def test_the_sign_test_takes_no_time_for_many_tasks() -> None:
    z = (300 - 1) / math.sqrt(20_300)
    assert compute_sign_p(10_000, 10_300) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)


def test_shares_of_won_tasks_give_the_same_p_in_both_tests() -> None:
    assert compute_sign_p(12, 0) == pytest.approx(2 / 2**12)
    assert compute_permutation_p([1.0] * 12 + [0.0] * 88)[0] == pytest.approx(2 / 2**12)
    assert compute_permutation_p([0.0] * 10) == (1.0, True)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_corrected_p_values_are_holm_s(values: list[float]) -> None:
    found = adjust_p(values)
    ranked = sorted(values)
    for p, adjusted in zip(values, found, strict=True):
        below = [(len(values) - rank) * each for rank, each in enumerate(ranked) if each <= p]
        assert adjusted == pytest.approx(min(1.0, max(below)))


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


def test_a_difference_is_that_of_shares() -> None:
    with pytest.raises(SpearError, match="outside"):
        estimate_difference([0.0, 50.0])


def test_differences_that_are_equal_but_for_rounding_count_as_equal() -> None:
    thirds = [2 / 3 - 1 / 3, 1 - 2 / 3]
    assert thirds[0] != thirds[1]
    found, equal = estimate_difference(thirds), estimate_difference([1 / 3, 1 / 3])
    assert (found.low, found.high) == pytest.approx((equal.low, equal.high))
    assert estimate_mean(thirds).high == pytest.approx(estimate_mean([1 / 3, 1 / 3]).high)
    assert judge_comparison(replace(compare([1.0]), steps=tuple(thirds))).detectable is None
