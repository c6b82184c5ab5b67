"""Reward terms and schedules, which the algorithms re-export from the environments' side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.rewards import Constant, CosineDecay, Schedule, make_schedule
from spear_training.algorithms import compose_reward, cosine_decay, cosine_warmup, tool_call_reward


def test_schedules_by_hand() -> None:
    assert [cosine_warmup(t, 100) for t in (0, 50, 100, 150)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert [cosine_decay(t, 100) for t in (0, 50, 100, 150)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert (cosine_warmup(3, 0), cosine_decay(3, 0), cosine_warmup(0, -1), cosine_decay(0, -1)) == (1.0, 0.0, 1.0, 0.0)


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_schedules_mirror_each_other_and_are_monotone(t: int, period: int) -> None:
    assert cosine_warmup(t, period) + cosine_decay(t, period) == pytest.approx(1.0)
    assert 0.0 <= cosine_warmup(t, period) <= cosine_warmup(t + 1, period) <= 1.0


@pytest.mark.parametrize("schedule", [cosine_warmup, cosine_decay])
def test_schedule_refuses_a_negative_step(schedule) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        schedule(-1, 10)


def test_tool_call_reward_by_hand() -> None:
    assert [tool_call_reward(n) for n in (0, 1, 3, 10, 25)] == pytest.approx([0.0, 0.1, 0.3, 1.0, 1.0])
    assert tool_call_reward(2, shape="any_if_correct", correct=True) == 1.0
    assert tool_call_reward(0, shape="any_if_correct", correct=True) == 0.0
    assert tool_call_reward(2, shape="any_if_correct", correct=False) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("calls", "options", "message"),
    [
        (-1, {}, "0 or more"),
        (1, {"shape": "cubic"}, "unknown shape"),
        (1, {"shape": "any_if_correct"}, "needs correct"),
    ],
)
def test_tool_call_reward_refuses(calls, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        tool_call_reward(calls, **options)


def test_compose_reward_weighs_only_the_tool_call_term() -> None:
    terms = {"outcome": -1.0, "tool_call": 0.3, "format": 0.1, "native_return": 99.0}
    assert compose_reward(terms, 0.5) == pytest.approx(-0.75)
    with pytest.raises(ValueError, match="lack tool_call, format"):
        compose_reward({"outcome": 1.0}, 1.0)


def test_make_schedule_forms() -> None:
    assert make_schedule("none") == Constant(0.0)
    assert make_schedule("constant") == make_schedule(1) == Constant()
    assert make_schedule("constant:0.5")(7) == make_schedule(0.5)(1) == 0.5
    assert make_schedule("cosine:200") == CosineDecay(200)
    assert make_schedule(CosineDecay(3))(1) == cosine_decay(1, 3)
    assert isinstance(CosineDecay(3), Schedule)


@pytest.mark.parametrize("spec", ["linear", "cosine", "cosine:0", "cosine:x", "constant:x", "none:1", None, True])
def test_make_schedule_refuses(spec) -> None:
    with pytest.raises(ValueError, match="cosine:200"):
        make_schedule(spec)
