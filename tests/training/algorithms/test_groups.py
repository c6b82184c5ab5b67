from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import group_statistics


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
