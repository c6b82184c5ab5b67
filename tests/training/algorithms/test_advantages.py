from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import discounted_returns, gigpo_advantages, group_advantages, rloo_advantages


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_kept_and_input_untouched(dtype: torch.dtype) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=dtype)
    before = rewards.clone()
    assert group_advantages(rewards, [0, 0, 0]).dtype is rloo_advantages(rewards, [0, 0, 0]).dtype is dtype
    assert torch.equal(rewards, before)


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
    for estimate in (group_advantages, rloo_advantages):
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


def test_no_rows_give_no_advantages() -> None:
    empty = tensor([])
    assert group_advantages(empty, [], trajectory_ids=[]).shape == rloo_advantages(empty, []).shape == (0,)
    assert gigpo_advantages(empty, empty, [], [], []).total.shape == (0,)


def test_discounted_returns_by_hand() -> None:
    assert discounted_returns(tensor([1.0, 0.0, 2.0]), 0.5).tolist() == [1.5, 1.0, 2.0]
    assert discounted_returns(tensor([]), 0.5).tolist() == []


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


def test_gigpo_invalid_rows_are_zero_and_unseen() -> None:
    rewards, steps = tensor([1.0, 1.0, 0.0, 9.0]), tensor([0.0, 1.0, 0.0, 9.0])
    got = gigpo_advantages(
        rewards, steps, ["g"] * 4, ["A", "A", "B", "A"], ["s", "t", "s", "s"], valid=[1, 1, 1, 0], gamma=1.0
    )
    assert got.step.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert got.total.tolist() == [1.0, 0.5, -1.0, 0.0]


def test_gigpo_refuses_wrong_lengths() -> None:
    two, ids = tensor([0.0, 1.0]), ["a", "b"]
    with pytest.raises(ValueError, match="step_rewards"):
        gigpo_advantages(two, tensor([0.0]), ids, ids, ids)
    with pytest.raises(ValueError, match="anchors has 1"):
        gigpo_advantages(two, two, ids, ids, ["x"])
    with pytest.raises(ValueError, match="turn_ids"):
        gigpo_advantages(two, two, ids, ids, ids, turn_ids=[0])
