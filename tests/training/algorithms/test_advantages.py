"""Advantages of groups and steps, their statistics, estimators by name, and the baseline buffer."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import (
    BaselineBuffer,
    RowTable,
    SettingsError,
    SpearSettings,
    StateMismatchError,
    discounted_returns,
    estimate,
    gigpo_advantages,
    group_advantages,
    group_statistics,
    recalibrate_advantages,
    rloo_advantages,
)
from spear_training.algorithms.estimators import average_tokens
from tests.training.algorithms.batches import tensor


def rows_of(values: torch.Tensor, ids: list, wanted) -> torch.Tensor:
    return values[[i for i, name in enumerate(ids) if name == wanted]]


@st.composite
def batches(draw, max_rows: int = 24):
    """Rows of a few groups and trajectories in any order; rewards on a grid, so that ties occur."""
    n = draw(st.integers(1, max_rows))
    rewards = draw(st.lists(st.sampled_from([-1.0, -0.9, 0.1, 1.1, 1.4, 10.2]), min_size=n, max_size=n))
    groups = draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n))
    trajectories = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    valid = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return tensor(rewards), groups, trajectories, valid


def test_group_advantages_by_hand() -> None:
    rewards = tensor([1.0, 5.0, -1.0, 1.0])
    ids = ["a", "b", "a", "a"]
    assert group_advantages(rewards, ids).tolist() == pytest.approx([2 / 3, 0.0, -4 / 3, 2 / 3])
    assert group_advantages(rewards, ids, singleton="raw")[1] == 5.0
    deviation = math.sqrt((4 / 9 + 16 / 9 + 4 / 9) / 2)
    normalised = group_advantages(rewards, ids, normalize_std=True, eps=0.0)
    assert normalised.tolist() == pytest.approx([2 / 3 / deviation, 0.0, -4 / 3 / deviation, 2 / 3 / deviation])


def test_group_advantages_weighs_trajectories_or_rows() -> None:
    rewards, ids = tensor([2.0, 2.0, 2.0, 0.0]), ["g"] * 4
    trajectories = ["long", "long", "long", "short"]
    assert group_advantages(rewards, ids, trajectory_ids=trajectories).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert group_advantages(rewards, ids, trajectory_ids=trajectories, weight="row").tolist() == [0.5, 0.5, 0.5, -1.5]


def test_equal_trajectory_ids_of_two_groups_are_two_trajectories() -> None:
    rewards = tensor([1.0, 0.0, 4.0, 0.0])
    got = group_advantages(rewards, ["a", "a", "b", "b"], trajectory_ids=[0, 1, 0, 1])
    assert got.tolist() == [0.5, -0.5, 2.0, -2.0]


def test_rloo_by_hand() -> None:
    got = rloo_advantages(tensor([1.0, -1.0, 1.0, 0.5, 0.3]), ["a", "a", "a", "a", "b"])
    assert got.tolist() == pytest.approx([1 - 0.5 / 3, -1 - 2.5 / 3, 1 - 0.5 / 3, 0.5 - 1 / 3, 0.0])


@given(batches())
def test_advantages_of_a_group_sum_to_zero(batch) -> None:
    rewards, groups, _, _ = batch
    for got in (group_advantages(rewards, groups), rloo_advantages(rewards, groups)):
        for name in set(groups):
            assert float(rows_of(got, groups, name).sum()) == pytest.approx(0.0, abs=1e-9)


@given(batches())
def test_invalid_rows_are_zero_and_change_nothing(batch) -> None:
    rewards, groups, trajectories, valid = batch
    on = [i for i, flag in enumerate(valid) if flag]
    for estimate in (group_advantages, rloo_advantages):  # noqa: F402
        got = estimate(rewards, groups, trajectory_ids=trajectories, valid=torch.tensor(valid))
        alone = estimate(rewards[on], [groups[i] for i in on], trajectory_ids=[trajectories[i] for i in on])
        assert torch.allclose(got[on], alone, atol=1e-12)
        assert not got[[i for i, flag in enumerate(valid) if not flag]].any()


@given(batches(), st.randoms(use_true_random=False), st.sampled_from(["trajectory", "row"]), st.booleans())
def test_order_of_rows_does_not_matter(batch, random, weight: str, normalize: bool) -> None:
    rewards, groups, trajectories, valid = batch
    order = list(range(len(groups)))
    random.shuffle(order)

    def estimate(rows: list[int]) -> torch.Tensor:
        return group_advantages(
            rewards[rows],
            [groups[i] for i in rows],
            trajectory_ids=[trajectories[i] for i in rows],
            valid=torch.tensor(valid)[rows],
            weight=weight,
            normalize_std=normalize,
        )

    assert torch.allclose(estimate(list(range(len(order))))[order], estimate(order), atol=1e-6)


@given(st.floats(-10, 10), st.integers(2, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, members: int, normalize: bool) -> None:
    got = group_advantages(tensor([reward] * members), ["g"] * members, normalize_std=normalize)
    assert got.tolist() == [0.0] * members  # rounding noise above 0 would pass the gate of the replay buffer
    assert rloo_advantages(tensor([reward] * members), ["g"] * members).tolist() == [0.0] * members


def test_wrong_arguments_are_refused() -> None:
    rewards = tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="group_ids has 1 entries for 2 rows"):
        group_advantages(rewards, ["a"])
    with pytest.raises(ValueError, match="trajectory_ids has 3"):
        group_advantages(rewards, ["a", "a"], trajectory_ids=[1, 2, 3], weight="row")
    with pytest.raises(ValueError, match="valid has shape"):
        group_advantages(rewards, ["a", "a"], valid=[True])
    with pytest.raises(ValueError, match="hashable"):
        group_advantages(rewards, [[], []])
    with pytest.raises(ValueError, match="floating-point"):
        group_advantages(torch.tensor([1, 2]), ["a", "a"])
    with pytest.raises(ValueError, match="median"):
        group_advantages(rewards, ["a", "a"], weight="median")


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.floats(0, 1))
def test_discounted_returns_equal_a_plain_loop(rewards: list[float], gamma: float) -> None:
    want, ahead = [], 0.0
    for reward in reversed(rewards):
        ahead = reward + gamma * ahead
        want.append(ahead)
    assert discounted_returns(tensor(rewards), gamma).tolist() == pytest.approx(want[::-1])


def naive_step_advantages(steps, groups, trajectories, anchors, turns, gamma: float) -> list[float]:
    n = len(steps)
    returns = []
    for i in range(n):
        later = [
            j for j in range(n) if (groups[j], trajectories[j]) == (groups[i], trajectories[i]) and turns[j] >= turns[i]
        ]
        later.sort(key=lambda j: turns[j])
        returns.append(sum(gamma**k * steps[j] for k, j in enumerate(later)))
    out = []
    for i in range(n):
        same = [returns[j] for j in range(n) if (groups[j], anchors[j]) == (groups[i], anchors[i])]
        out.append(returns[i] - sum(same) / len(same) if len(same) > 1 else 0.0)
    return out


@settings(deadline=None)
@given(batches(), st.data())
def test_gigpo_equals_a_plain_loop(batch, data) -> None:
    rewards, groups, trajectories, _ = batch
    n = len(groups)
    steps = data.draw(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=n, max_size=n))
    anchors = data.draw(st.lists(st.sampled_from("xyz"), min_size=n, max_size=n))
    turns = data.draw(st.permutations(range(n)))
    got = gigpo_advantages(
        rewards, tensor(steps), groups, trajectories, anchors, turn_ids=turns, gamma=0.9, step_weight=0.5
    )
    want = naive_step_advantages(steps, groups, trajectories, anchors, turns, 0.9)
    assert got.step.tolist() == pytest.approx(want, abs=1e-9)
    episode = group_advantages(rewards, groups, trajectory_ids=trajectories)
    assert torch.equal(got.episode, episode)
    assert torch.allclose(got.total, episode + 0.5 * got.step)


def test_statistics_by_hand_in_first_seen_order() -> None:
    got = group_statistics(tensor([3.0, 1.0, 1.0, -1.0]), ["late", "early", "late", "early"], ddof=0)
    assert got.ids == ("late", "early")
    assert (got.mean.tolist(), got.std.tolist(), got.count.tolist()) == ([2.0, 0.0], [1.0, 1.0], [2, 2])


def test_each_trajectory_counts_once_and_dead_groups_are_left_out() -> None:
    got = group_statistics(
        tensor([4.0, 4.0, 1.0, 7.0]), ["a", "a", "a", "b"], trajectory_ids=[0, 0, 1, 0], valid=[1, 1, 1, 0], ddof=1
    )
    assert got.ids == ("a",)
    assert got.mean.tolist() == [2.5]
    assert got.count.tolist() == [2]
    assert group_statistics(tensor([1.0]), ["a"], ddof=1).std.tolist() == [0.0]


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=40), st.integers(0, 1))
def test_statistics_equal_numpy(rows, ddof: int) -> None:
    rewards, ids = [r for r, _ in rows], [g for _, g in rows]
    got = group_statistics(tensor(rewards), torch.tensor(ids), ddof=ddof)
    for name, mean, std, count in zip(got.ids, got.mean, got.std, got.count, strict=True):
        members = np.array([r for r, g in rows if g == name])
        assert float(mean) == pytest.approx(members.mean(), abs=1e-9)
        assert float(std) == pytest.approx(members.std(ddof=ddof) if members.size > ddof else 0.0, abs=1e-6)
        assert int(count) == members.size


def choose(**values: Any) -> SpearSettings:
    return SpearSettings.from_mapping({"advantage": values})


def count(first: int, turns: int) -> range:
    return range(first, first + turns)


def make_rows(*rows: dict[str, Any]) -> RowTable:
    """Rows of turns given as (tokens up to the end of the response, reward); ``numbers`` are those of its turns."""
    turns = [turn for row in rows for turn in row["turns"]]
    return RowTable(
        key=[f"k{n}" for n in range(len(rows))],
        group=[row["group"] for row in rows],
        trajectory=[row["trajectory"] for row in rows],
        turn=[row.get("turn", 0) for row in rows],
        prompt_length=[1] * len(rows),
        response_length=[row["turns"][-1][0] for row in rows],
        reward=[row["reward"] for row in rows],
        turns=[len(row["turns"]) for row in rows],
        turn_number=[n for row in rows for n in row.get("numbers", count(row.get("turn", 0), len(row["turns"])))],
        turn_end=[end for end, _ in turns],
        turn_reward=[reward for _, reward in turns],
    )


def test_stepwise_credit_by_hand() -> None:
    # Two conversations of two turns; episode advantages are +1 and -1. With gamma 1/2 the returns are 1 + 2/2 = 2 and
    # 2 of the first, 0 and 0 of the second: from their means, +1 and +1, -1 and -1.
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 1.0, "turns": [(2, 1.0), (5, 2.0)]},
        {"group": "g", "trajectory": "b", "reward": -1.0, "turns": [(1, 0.0), (3, 0.0)]},
    )
    found = estimate(rows, choose(estimator="stepwise", gamma=0.5, step_weight=1.0))
    assert found.tolist() == pytest.approx([2.0] * 5 + [-2.0] * 3)
    uneven = rows.add(turn_reward=[3.0, 0.0, 0.0, 1.0])
    # Returns 3 and 0 against 1/2 and 1: first turns +-1.25, second turns -+0.5.
    found = estimate(uneven, choose(estimator="stepwise", gamma=0.5, step_weight=2.0))
    first, second = [1 + 2.5] * 2 + [1 - 1.0] * 3, [-1 - 2.5] * 1 + [-1 + 1.0] * 2
    assert found.tolist() == pytest.approx(first + second)


def test_stepwise_credit_goes_back_through_conversations_that_alternate() -> None:
    # A planner writes turns 0 and 2, another model turn 1. Only the last turn earns: 4, before it 2 and 1.
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 0.0, "turns": [(1, 0.0), (2, 4.0)], "numbers": [0, 2]},
        {"group": "g", "trajectory": "a", "reward": 0.0, "turns": [(1, 0.0)], "numbers": [1]},
        *({"group": "g", "trajectory": "b", "reward": 0.0, "turns": [(1, 0.0)], "turn": n} for n in range(3)),
    )
    found = estimate(rows, choose(estimator="stepwise", gamma=0.5, step_weight=2.0))
    assert found.tolist() == pytest.approx([1.0, 4.0, 2.0, -1.0, -2.0, -4.0])


def test_stepwise_credit_is_the_same_in_either_layout() -> None:
    whole = make_rows(
        {"group": "g", "trajectory": "a", "reward": 1.0, "turns": [(2, 0.3), (5, -0.2), (6, 1.0)]},
        {"group": "g", "trajectory": "b", "reward": -1.0, "turns": [(1, 0.0), (3, 0.4)]},
    )
    parts = make_rows(
        *(
            {"group": "g", "trajectory": name, "reward": reward, "turn": n, "turns": [(size, paid)]}
            for name, reward, turns in (
                ("b", -1.0, [(1, 0.0), (2, 0.4)]),
                ("a", 1.0, [(2, 0.3), (3, -0.2), (1, 1.0)]),
            )
            for n, (size, paid) in enumerate(turns)
        )
    )
    settings = choose(estimator="stepwise", gamma=0.9)
    one, other = estimate(whole, settings), estimate(parts, settings)
    assert one.tolist() == pytest.approx([*other[3:], *other[:3]])


def leave_one_out(rows, settings):
    return [reward - (rows.reward.sum() - reward) / (len(rows) - 1) for reward in rows.reward]


def by_token(rows, settings):
    return np.arange(rows.response_length.sum())


def too_many(rows, settings):
    return np.zeros(len(rows) + 5)


def not_finite(rows, settings):
    return np.full(len(rows), np.nan)


def test_an_estimator_of_ones_own_is_named_by_its_module() -> None:
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 3.0, "turns": [(2, 0.0)]},
        {"group": "g", "trajectory": "b", "reward": 1.0, "turns": [(1, 0.0)]},
    )
    assert estimate(rows, choose(estimator=f"{__name__}:leave_one_out")).tolist() == [2.0, -2.0]
    assert estimate(rows, choose(estimator=f"{__name__}:by_token")).tolist() == [0.0, 1.0, 2.0]
    for name, message in (("too_many", r"\[7\] advantages for 2 rows with 3"), ("not_finite", "not finite")):
        with pytest.raises(SettingsError, match=message):
            estimate(rows, choose(estimator=f"{__name__}:{name}"))


def test_rloo_leaves_out_a_trajectory_or_a_row() -> None:
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 1.0, "turns": [(2, 0.0)]},
        {"group": "g", "trajectory": "a", "reward": 1.0, "turns": [(2, 0.0)]},
        {"group": "g", "trajectory": "b", "reward": -1.0, "turns": [(1, 0.0)]},
    )
    assert estimate(rows, choose(estimator="rloo")).tolist() == [2.0, 2.0, -2.0]
    assert estimate(rows, choose(estimator="rloo", weight="row")).tolist() == [1.0, 1.0, -2.0]


def test_tokens_are_averaged_over_the_loss_tokens() -> None:
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 0.0, "turns": [(3, 0.0)]},
        {"group": "g", "trajectory": "b", "reward": 0.0, "turns": [(2, 0.0)]},
    )
    values, mask = np.asarray([1.0, 9.0, 3.0, 5.0, 5.0]), np.asarray([1, 0, 1, 0, 0], dtype=bool)
    assert average_tokens(values, mask, rows).tolist() == [2.0, 0.0]


finite = st.floats(-1e6, 1e6)


@given(st.lists(st.lists(finite, max_size=7), max_size=7), st.integers(0, 10))
def test_first_in_first_out(chunks, capacity: int) -> None:
    buffer, everything = BaselineBuffer(capacity), []
    for chunk in chunks:
        buffer.extend(chunk)
        everything += chunk
        assert len(buffer) == min(capacity, len(everything))
    assert buffer.values == (everything[-capacity:] if capacity else [])


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_equals_numpy(values, q: float) -> None:
    buffer = BaselineBuffer(100)
    buffer.extend(torch.tensor(values, dtype=torch.float64))
    assert buffer.percentile(q) == pytest.approx(float(np.percentile(values, q)))


@given(st.lists(finite, max_size=20))
def test_state_survives_json_exactly(values) -> None:
    buffer, twin = BaselineBuffer(8), BaselineBuffer(8)
    buffer.extend(values)
    twin.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert twin.values == buffer.values
    twin.extend([1.0])
    buffer.extend([1.0])
    assert twin.values == buffer.values


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        BaselineBuffer(-1)
    buffer = BaselineBuffer(4)
    with pytest.raises(ValueError, match="empty"):
        buffer.percentile()
    with pytest.raises(ValueError, match="empty"):
        recalibrate_advantages(torch.ones(1), buffer)
    with pytest.raises(ValueError, match="not finite"):
        buffer.extend([1.0, float("nan")])
    assert len(buffer) == 0
    with pytest.raises(StateMismatchError, match=r"capacity=5.*this run 4"):
        buffer.load_state_dict({"capacity": 5, "values": []})


def test_recalibration_by_hand() -> None:
    buffer = BaselineBuffer(10)
    buffer.extend([1, 2])
    rewards = torch.tensor([1.5, 2.0, -1.0], dtype=torch.float64)
    assert recalibrate_advantages(rewards, buffer).tolist() == [0.0, 0.5, -2.5]
    assert recalibrate_advantages(rewards, 1.0).tolist() == [0.5, 1.0, -2.0]
    assert rewards.tolist() == [1.5, 2.0, -1.0]


@given(st.sampled_from([1.1, 0.1, -0.9, 1 / 3]), st.integers(1, 9))
def test_a_reward_equal_to_the_baseline_is_exactly_zero(reward: float, count: int) -> None:
    buffer = BaselineBuffer(10)
    buffer.extend(torch.tensor([reward] * count, dtype=torch.float32))
    assert recalibrate_advantages(torch.tensor([reward], dtype=torch.float32), buffer).tolist() == [0.0]
