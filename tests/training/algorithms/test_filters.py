from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import has_repetition, keep_high_variance_groups, overlong_mask, void_turn_mask


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_high_variance_groups_by_hand() -> None:
    rewards = tensor([0.0, 0.5, 1.0, 0.0, 0.5, -1.0, 1.0, 1.0])
    ids = ["flat", "mid", "wide", "flat", "mid", "wide", "tie", "tie"]
    assert keep_high_variance_groups(rewards, ids, ratio=0.25).tolist() == [name == "wide" for name in ids]
    # of three groups without spread, the one seen first stays
    assert keep_high_variance_groups(rewards, ids, ratio=0.5).tolist() == [name in ("wide", "flat") for name in ids]


def test_group_filter_ignores_invalid_rows_and_counts_trajectories_once() -> None:
    rewards = tensor([1.0, 1.0, 9.0, 0.0, 1.0, 2.0])
    ids = ["a", "a", "a", "b", "b", "c"]
    got = keep_high_variance_groups(rewards, ids, ratio=0.5, valid=[1, 1, 0, 1, 1, 0])
    assert got.tolist() == [False, False, False, True, True, False]
    assert not keep_high_variance_groups(rewards, ids, valid=[0] * 6).any()
    # rows 4, 0, 0, 0 spread less as trajectories (4, 0) of equal weight than as rows, and b overtakes
    rewards, ids = tensor([4.0, 0.0, 0.0, 0.0, 3.9, 0.0]), ["a"] * 4 + ["b"] * 2
    got = keep_high_variance_groups(rewards, ids, ratio=0.5, trajectory_ids=[0, 1, 1, 1, 0, 1])
    assert got.tolist() == [True] * 4 + [False] * 2
    assert keep_high_variance_groups(rewards, ids, ratio=0.5).tolist() == [False] * 4 + [True] * 2


@given(
    st.lists(st.lists(st.sampled_from([-1.0, -0.9, 0.3, 1.1]), min_size=2, max_size=6), min_size=1, max_size=12),
    st.floats(0.05, 1),
    st.randoms(use_true_random=False),
)
def test_group_filter_keeps_whole_groups_of_largest_spread(groups, ratio: float, random) -> None:
    rows = [(name, reward) for name, members in enumerate(groups) for reward in members]
    random.shuffle(rows)
    ids = [name for name, _ in rows]
    kept = keep_high_variance_groups(tensor([reward for _, reward in rows]), ids, ratio=ratio).tolist()
    chosen = {name for name, keep in zip(ids, kept, strict=True) if keep}
    assert all(keep == (name in chosen) for name, keep in zip(ids, kept, strict=True))
    assert len(chosen) == max(1, math.floor(ratio * len(groups) + 1e-9))
    spread = [float(np.std(members)) for members in groups]
    dropped = [spread[name] for name in set(ids) - chosen]
    assert not dropped or min(spread[name] for name in chosen) >= max(dropped) - 1e-8
    first_seen = list(dict.fromkeys(ids))
    for name in chosen:  # ties go to the group seen first
        earlier = first_seen[: first_seen.index(name)]
        assert all(other in chosen for other in earlier if abs(spread[other] - spread[name]) < 1e-12)


def test_overlong_by_hand() -> None:
    lengths = torch.tensor([10, 512, 512, 513])
    assert overlong_mask(lengths, 512).tolist() == [False, True, True, True]
    assert overlong_mask(lengths, 512, finished=torch.tensor([0, 1, 0, 1])).tolist() == [False, False, True, True]


def test_void_turns_by_hand() -> None:
    void, ids = torch.tensor([0, 1, 0, 0]), ["A", "B", "A", "B"]
    assert void_turn_mask(void, ids).tolist() == [False, True, False, True]
    assert void_turn_mask(void, ids, scope="turn").tolist() == [False, True, False, False]
    assert void_turn_mask(void, ids, scope="off").tolist() == [False] * 4
    with pytest.raises(ValueError, match="trajectory_ids has 1"):
        void_turn_mask(void, ["A"])
    with pytest.raises(ValueError):
        void_turn_mask(void, ids, scope="episode")


def test_repetition_by_hand() -> None:
    assert not has_repetition([1] * 28)
    assert has_repetition([1] * 29)  # ten windows of twenty
    assert not has_repetition(range(500))
    assert has_repetition([1, 2, 9, 1, 2, 8, 1, 2], ngram=2, times=3)
    assert not has_repetition([], ngram=1, times=1) and has_repetition([4], ngram=1, times=1)
    with pytest.raises(ValueError, match="1 or more"):
        has_repetition([1], ngram=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_repetition_equals_a_plain_count(ids: list[int], ngram: int, times: int, as_tensor: bool) -> None:
    windows = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
    want = any(windows.count(window) >= times for window in windows)
    assert has_repetition(torch.tensor(ids) if as_tensor else ids, ngram=ngram, times=times) is want
