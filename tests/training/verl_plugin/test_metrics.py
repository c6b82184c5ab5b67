from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.trajectory import StopReason
from spear_training.algorithms import SpearSettings
from spear_training.verl_plugin.metrics import summarize_episodes, summarize_plan, summarize_rewards
from spear_training.verl_plugin.plan import plan_update


def make_step(make: Any) -> list[Any]:
    return [
        make.episode("a", 0, won=True, subtask="near", turns=2, tool_calls=2),
        make.episode("a", 1, subtask="near", turns=4, well_formed_turns=1, valid_actions=3, tool_calls=3, score=0.5),
        make.episode("b", 0, won=True, subtask="far", turns=6, tool_calls=6, stop="won"),
        make.episode("b", 1, won=True, subtask="far", turns=1, fault="timeout", stop="fault", tool_calls=1),
    ]


def test_success_is_reported_by_subtask_without_faults_and_without_bonus(make: Any) -> None:
    metrics = summarize_episodes(make_step(make))
    assert metrics["success/near"] == 0.5 and metrics["success/far"] == 1.0
    assert metrics["success/all"] == pytest.approx(2 / 3)
    assert metrics["score/mean"] == pytest.approx(2.5 / 3)
    assert metrics["turns/mean"] == 4.0
    assert metrics["tool_calls/mean"] == pytest.approx(11 / 3)
    assert metrics["turns/well_formed"] == pytest.approx(9 / 12)
    assert metrics["turns/valid_action"] == pytest.approx(11 / 12)


def test_stops_are_shares_of_all_episodes_and_faults_are_counted(make: Any) -> None:
    metrics = summarize_episodes(make_step(make))
    stops = {reason.value: metrics[f"stop/{reason.value}"] for reason in StopReason}
    assert stops == {"won": 0.5, "failed": 0.0, "turn_limit": 0.25, "context_limit": 0.0, "fault": 0.25}
    assert metrics["fault/timeout"] == 1.0
    assert {name for name in metrics if name.startswith("fault/")} == {"fault/timeout"}


def test_a_step_of_faults_alone_has_no_success(make: Any) -> None:
    records = [make.episode("a", n, fault="bug", stop="fault") for n in range(2)]
    metrics = summarize_episodes(records)
    assert metrics["stop/fault"] == 1.0 and metrics["fault/bug"] == 2.0
    assert not any(name.startswith(("success", "score", "turns", "tool_calls")) for name in metrics)
    settings = SpearSettings()
    plan = plan_update(records, settings, mu=1.0, max_response_length=8)
    assert summarize_rewards(plan.rewards, records) == {}
    assert summarize_plan(plan) == {
        "mask/overlong": 0.0,
        "mask/void": 0.0,
        "mask/repetition": 0.0,
        "mask/low_variance": 0.0,
        "groups/equal": 0.0,
        "rows/total": 0.0,
        "rows/trained": 0.0,
    }


def test_no_episodes_give_no_nan() -> None:
    assert set(summarize_episodes([]).values()) == {0.0}


def test_rewards_are_means_over_what_counts(make: Any) -> None:
    records = make_step(make)
    plan = plan_update(records, SpearSettings(), mu=0.5, max_response_length=8)
    metrics = summarize_rewards(plan.rewards, records)
    assert metrics["reward/outcome"] == pytest.approx(1 / 3)
    assert metrics["reward/tool_call"] == pytest.approx(1.1 / 3)
    assert metrics["reward/format"] == pytest.approx(0.1)
    assert metrics["reward/total"] == pytest.approx(1 / 3 + 0.5 * 1.1 / 3 + 0.1)


def test_masks_are_shares_of_the_rows_of_valid_episodes(make: Any) -> None:
    records = [make.episode("a", 0, won=True, rows=[{"void": True}]), make.episode("a", 1)]
    settings = SpearSettings.from_mapping({"filter": {"void": "turn"}})
    metrics = summarize_plan(plan_update(records, settings, mu=0.0, max_response_length=8))
    assert metrics["mask/void"] == 0.25
    assert (metrics["rows/total"], metrics["rows/trained"]) == (4.0, 3.0)
    assert metrics["advantage/mean"] == pytest.approx(-1 / 3)
    assert metrics["advantage/std"] > 0


def test_groups_whose_episodes_earned_the_same_are_counted(make: Any) -> None:
    records = [make.episode(group, n, won=group == "a" and n == 0) for group in "abcd" for n in range(3)]
    records.append(make.episode("e", 0, won=True, fault="timeout"))  # a group of a fault alone is no group
    plan = plan_update(records, SpearSettings(), mu=0.0, max_response_length=8)
    assert summarize_plan(plan)["groups/equal"] == 0.75
