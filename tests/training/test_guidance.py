"""Advice: each rule speaks where it should, names the mend, and the mend silences it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import SpearSettings
from spear_training.guidance import WINDOW, Advice, RunShape, review_history, review_settings

SHAPE = RunShape(tasks=16, group_size=8, max_turns=15, per_turn=True, steps=200)


def choose(**nodes: Any) -> SpearSettings:
    return SpearSettings.from_mapping(nodes)


def get_topics(found: list[Advice]) -> set[str]:
    return {advice.topic for advice in found}


def test_the_librarys_defaults_need_no_advice() -> None:
    assert review_settings(SpearSettings(), SHAPE) == []


FIXED = {"bounds": "fixed", "lower": 2, "upper": 60}
SETTING_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # topic: settings, changes of the shape, and the mend that the advice names
    "group size": ({}, {"group_size": 1, "tasks": 500}, {"advantage": {"estimator": "gae"}}),
    "covariance bounds": ({"cov": FIXED}, {}, {"cov": {"bounds": "running"}}),
    "replay buffer": ({"replay": {"capacity": 10_000}}, {}, {"replay": {"capacity": 1440}}),
    "warm-up": ({"sil": {"warmup_steps": 400}}, {}, {"sil": {"warmup_steps": 200}}),
    "decay": ({"reward": {"decay_steps": 400}}, {}, {"reward": {"decay_steps": 200}}),
    "reward scale": ({"reward": {"success": 1, "failure": 0}}, {}, {"reward": {"success": 1, "failure": -1}}),
    "anchors": ({"advantage": {"estimator": "gigpo"}}, {"per_turn": False, "tasks": 300}, {"advantage": {}}),
    "sequence clip": ({"loss": {"policy": "gspo"}}, {}, {"clip": {"low": 0.0003, "high": 0.0004}}),
}


@pytest.mark.parametrize("topic", SETTING_CASES)
def test_settings_that_couple_badly_are_told_with_their_mend(topic: str) -> None:
    nodes, sizes, mend = SETTING_CASES[topic]
    shape = replace(SHAPE, **sizes)
    (advice,) = review_settings(choose(**nodes), shape)
    assert advice.topic == topic and advice.mend and str(advice) == f"{advice.finding}: {advice.mend}"
    assert review_settings(choose(**(nodes | mend)), shape) == []
    for node, values in mend.items():
        if values.get("estimator") is None:
            assert all(f"spear.{node}.{key}={value}" in advice.mend for key, value in values.items()), advice.mend


@pytest.mark.parametrize(
    ("nodes", "sizes", "topic"),
    [
        ({"replay": {"max_age": 0}}, {}, "replay buffer"),
        ({"replay": {"max_age": None}}, {"steps": 2}, "replay buffer"),
        ({"replay": {"unit": "trajectory"}}, {}, "replay buffer"),
        ({}, {"per_turn": False}, "replay buffer"),
        ({"sil": {"gamma": "none"}}, {}, "warm-up"),
    ],
)
def test_more_ways_to_the_same_advice(nodes: dict[str, Any], sizes: dict[str, Any], topic: str) -> None:
    assert topic in get_topics(review_settings(choose(**nodes), replace(SHAPE, **sizes)))


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ({"cov": FIXED, "reward": {"success": 10, "failure": 0}}, {}),
        ({"cov": {**FIXED, "lower": 1, "upper": 40}}, {}),
        ({"cov": FIXED, "sil": {"enabled": False}}, {}),
        ({"replay": {"max_age": None, "capacity": 10_000}}, {}),
        ({"sil": {"gamma": "constant", "warmup_steps": 999}}, {}),
        ({"reward": {"mu": "none", "decay_steps": 999}}, {}),
        ({"advantage": {"singleton": "raw"}}, {"group_size": 1, "tasks": 500}),
        ({"loss": {"policy": "cispo"}}, {}),
        ({}, {"steps": 2}),  # a dry run has the schedules of the real one
    ],
)
def test_what_fits_is_not_told(nodes: dict[str, Any], sizes: dict[str, Any]) -> None:
    assert review_settings(choose(**nodes), replace(SHAPE, **sizes)) == []


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 60), st.integers(1, 30_000), st.integers(1, 9))
def test_the_capacity_that_is_named_fills(tasks: int, group: int, turns: int, capacity: int, age: int) -> None:
    shape = replace(SHAPE, tasks=tasks, group_size=group, max_turns=turns)
    settings = choose(replay={"capacity": capacity, "max_age": age})
    for advice in review_settings(settings, shape):
        if advice.topic == "replay buffer":
            named = int(advice.mend.split("spear.replay.capacity=")[1].split(",")[0])
            again = review_settings(settings.override({"replay": {"capacity": named}}), shape)
            assert named <= capacity and ("replay buffer" not in get_topics(again) or named == 1)


# ---- a run's metrics -------------------------------------------------------------------------------------------------
QUIET = {
    "entropy/token-mean": 1.0,
    "clip/ppo_fraction": 0.02,
    "groups/equal": 0.3,
    "groups/same_outcome": 0.4,
    "success/all": 0.4,
    "rows/trained": 100.0,
    "mask/void": 0.1,
    "mask/overlong": 0.0,
    "mask/repetition": 0.0,
    "replay/size": 500.0,
    "replay/drawn": 10.0,
    "clip/cov_fraction": 0.01,
    "training/rollout_log_probs_diff_mean": 1e-6,
    "kl/old": 0.02,
    "replay/ess": 0.9,
    "replay/failed": 0.1,
    "spear/mu": 0.5,
}


def run(count: int = 25, *, without: tuple[str, ...] = (), **changes: float) -> list[dict[str, Any]]:
    """Metrics of ``count`` equal steps, among records of validation alone."""
    step = {name: value for name, value in QUIET.items() if name not in without}
    step |= {name.replace("__", "/"): value for name, value in changes.items()}
    steps = [{"step": t, "training/global_step": t, **step} for t in range(1, count + 1)]
    return [{"step": 0, "val/success/all": 0.1}, *steps]


def test_a_healthy_run_needs_no_advice() -> None:
    assert review_history(run(), SpearSettings()) == []
    assert review_history([], SpearSettings()) == []


DRAWS = ("replay/drawn", "clip/cov_fraction")
HISTORY_CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "covariance clip": (run(clip__cov_fraction=0.0), "spear.cov.lower_top"),
    "equal advantages": (run(groups__equal=0.95), "rollout.n"),
    "empty buffer": (run(without=DRAWS), "spear.replay.max_age=26"),
    "masks": (run(mask__void=0.6), "spear.filter.void=off"),
    "idle steps": (run(rows__trained=0.0), "switch off the filter"),
    "large updates": (run(clip__ppo_fraction=0.5), "optim.lr"),
    "stale replay": (run(replay__ess=0.3), "spear.replay.max_age"),
    "imitated failures": (run(replay__failed=0.74), "spear.reward.decay_steps"),
    "rollout engine": (run(**{"training/rollout_log_probs_diff_mean": 0.2}), "rollout.dtype"),
    "entropy": ([*run(6), *run(9, **{"entropy/token-mean": 0.05})], "spear.sil.warmup_steps"),
}


@pytest.mark.parametrize("topic", HISTORY_CASES)
def test_a_run_that_goes_wrong_is_told_with_the_mend(topic: str) -> None:
    records, mend = HISTORY_CASES[topic]
    (advice,) = review_history(records, SpearSettings())
    assert advice.topic == topic and mend in advice.mend


@pytest.mark.parametrize(
    ("records", "nodes", "mend"),
    [
        (run(clip__cov_fraction=0.0), {"cov": FIXED}, "spear.cov.bounds=running"),
        (run(groups__equal=1.0, success__all=0.99), {}, "harder"),
        (run(groups__equal=1.0, success__all=0.01), {}, "easier"),
        (run(without=DRAWS, replay__size=0.0, replay__dropped_other=9.0), {}, "require_tool_call=false"),
        (run(without=DRAWS, replay__size=0.0), {}, "easier tasks"),
        ([*run(6), *run(9, **{"entropy/token-mean": 3.0})], {}, "learning rate"),
        (run(mask__overlong=0.9), {}, "data.max_response_length"),
        (run(mask__repetition=0.9), {}, "temperature"),
        (run(kl__old=0.4), {"loss": {"policy": "cispo"}}, "ppo_mini_batch_size"),
        (run(replay__failed=0.74, spear__mu=0.0), {}, "spear.reward.format=none"),
        (run(replay__failed=0.74), {}, "spear.sil.gamma=success"),
        (run(replay__failed=0.74), {"sil": {"gamma": "success"}}, "require_tool_call"),
        (run(replay__failed=0.74, spear__mu=0.0), {"reward": {"format": "none"}}, "easier tasks"),
        (run(groups__same_outcome=0.9, spear__mu=0.0), {"advantage": {"normalize_std": True}}, "format=none"),
    ],
)
def test_the_mend_depends_on_the_cause(records: list[dict[str, Any]], nodes: dict[str, Any], mend: str) -> None:
    (advice,) = review_history(records, choose(**nodes))
    assert mend in advice.mend


@pytest.mark.parametrize(
    ("records", "nodes"),
    [
        (run(groups__equal=1.0), {"advantage": {"estimator": "gae"}}),
        (run(without=DRAWS), {"sil": {"enabled": False}}),
        (run(groups__same_outcome=0.9, spear__mu=0.0), {"advantage": {"normalize_std": False}}),
        (run(groups__same_outcome=0.9, spear__mu=0.1), {"advantage": {"normalize_std": True}}),
        (
            run(groups__same_outcome=0.9, spear__mu=0.0),
            {"advantage": {"normalize_std": True}, "reward": {"format": "none"}},
        ),
        (run(groups__same_outcome=0.6, spear__mu=0.0), {"advantage": {"normalize_std": True}}),
        (run(8, without=DRAWS), {}),
        (run(WINDOW - 1, groups__equal=1.0, rows__trained=0.0), {}),
        (run(clip__cov_fraction=0.0), {"cov": {"ratio": 0.0}}),
        (run(clip__ppo_fraction=0.5), {"loss": {"policy": "gspo"}}),
        ([*run(20), *run(2, kl__old=0.9)], {}),
        ([*run(20), *run(4, rows__trained=0.0)], {}),
        (run(WINDOW - 1, replay__failed=1.0, replay__ess=0.1, kl__old=1.0), {}),
    ],
)
def test_too_early_or_not_concerned_is_not_told(records: list[dict[str, Any]], nodes: dict[str, Any]) -> None:
    assert review_history(records, choose(**nodes)) == []


def test_what_is_not_finite_is_left_out() -> None:
    records = [record | {"entropy/token-mean": None, "clip/ppo_fraction": float("nan")} for record in run()]
    assert review_history(records, SpearSettings()) == []


def test_older_weights_are_no_fault_of_the_engine() -> None:
    apart = {"training/rollout_log_probs_diff_mean": 0.2}
    assert review_history(run(**apart, **{"staleness/mean": 0.9}), SpearSettings()) == []
    assert len(review_history(run(**apart, **{"staleness/mean": 0.0}), SpearSettings())) == 1
