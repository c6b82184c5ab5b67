from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import BaselineBuffer, StateMismatchError, recalibrate_advantages

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
