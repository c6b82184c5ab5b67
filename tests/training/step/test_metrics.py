from __future__ import annotations

import pytest

from spear_agents.trajectory import StopReason
from spear_training.algorithms import SpearSettings
from spear_training.step.metrics import summarize_episodes, summarize_plan, summarize_rewards
from spear_training.step.plan import plan_rows
from tests.training.episodes import Episode, make_episode, play


def make_step() -> list[Episode]:
    return [
        make_episode("a", 0, won=True, subtask="near", turns=2, tool_calls=2),
        make_episode("a", 1, subtask="near", turns=4, well_formed_turns=1, valid_actions=3, tool_calls=3, score=0.5),
        make_episode("b", 0, won=True, subtask="far", turns=6, tool_calls=6, stop="won"),
        make_episode("b", 1, won=True, subtask="far", turns=1, fault="timeout", stop="fault", tool_calls=1),
    ]


def test_success_is_reported_by_subtask_without_faults_and_without_bonus() -> None:
    metrics = summarize_episodes(play(make_step()).records)
    assert metrics["success/near"] == 0.5 and metrics["success/far"] == 1.0
    assert metrics["success/all"] == pytest.approx(2 / 3)
    assert metrics["score/mean"] == pytest.approx(2.5 / 3)
    assert metrics["turns/mean"] == 4.0
    assert metrics["tool_calls/mean"] == pytest.approx(11 / 3)
    assert metrics["turns/well_formed"] == pytest.approx(9 / 12)
    assert metrics["turns/valid_action"] == pytest.approx(11 / 12)


def test_stops_are_shares_of_all_episodes_and_faults_are_counted() -> None:
    metrics = summarize_episodes(play(make_step()).records)
    stops = {reason.value: metrics[f"stop/{reason.value}"] for reason in StopReason}
    assert stops == {"won": 0.5, "failed": 0.0, "turn_limit": 0.25, "context_limit": 0.0, "quit": 0.0, "fault": 0.25}
    assert metrics["fault/timeout"] == 1.0
    assert {name for name in metrics if name.startswith("fault/")} == {"fault/timeout"}


def test_a_step_of_faults_alone_has_no_success() -> None:
    records = [make_episode("a", n, fault="bug", stop="fault") for n in range(2)]
    metrics = summarize_episodes(play(records).records)
    assert metrics["stop/fault"] == 1.0 and metrics["fault/bug"] == 2.0
    assert not any(name.startswith(("success", "score", "turns", "tool_calls")) for name in metrics)
    settings = SpearSettings()
    plan = plan_rows(play(records), settings, mu=1.0, max_response_length=8)
    assert summarize_rewards(plan.rewards, play(records).records) == {}
    assert summarize_plan(plan) == {
        "mask/overlong": 0.0,
        "mask/void": 0.0,
        "mask/repetition": 0.0,
        "mask/low_variance": 0.0,
        "groups/equal": 0.0,
        "groups/same_outcome": 0.0,
        "rows/total": 0.0,
        "rows/trained": 0.0,
    }


def test_no_episodes_give_no_nan() -> None:
    assert set(summarize_episodes([]).values()) == {0.0}


def test_rewards_are_means_over_what_counts() -> None:
    records = make_step()
    plan = plan_rows(play(records), SpearSettings(), mu=0.5, max_response_length=8)
    metrics = summarize_rewards(plan.rewards, play(records).records)
    assert metrics["reward/outcome"] == pytest.approx(1 / 3)
    assert metrics["reward/tool_call"] == pytest.approx(1.1 / 3)
    assert metrics["reward/format"] == pytest.approx(0.1)
    assert metrics["reward/total"] == pytest.approx(1 / 3 + 0.5 * 1.1 / 3 + 0.1)


def test_masks_are_shares_of_the_rows_of_valid_episodes() -> None:
    records = [make_episode("a", 0, won=True, rows=[{"void": True}]), make_episode("a", 1)]
    settings = SpearSettings.from_mapping({"filter": {"void": "turn"}})
    metrics = summarize_plan(plan_rows(play(records), settings, mu=0.0, max_response_length=8))
    assert metrics["mask/void"] == 0.25
    assert (metrics["rows/total"], metrics["rows/trained"]) == (4.0, 3.0)


def test_groups_whose_episodes_earned_the_same_are_counted() -> None:
    records = [make_episode(group, n, won=group == "a" and n == 0) for group in "abcd" for n in range(3)]
    records.append(make_episode("e", 0, won=True, fault="timeout"))  # a group of a fault alone is not a group
    plan = plan_rows(play(records), SpearSettings(), mu=0.0, max_response_length=8)
    assert summarize_plan(plan)["groups/equal"] == 0.75


def test_groups_of_one_outcome_are_counted_whatever_else_their_episodes_earned() -> None:
    malformed = {"terms": {"outcome": -1.0, "format": 0.0, "tool_call": 0.0}}
    records = [make_episode("a", n, won=n == 0) for n in range(3)]
    records += [make_episode("b", n, **(malformed if n == 0 else {})) for n in range(3)]
    records += [make_episode("c", n) for n in range(3)]
    found = summarize_plan(plan_rows(play(records), SpearSettings(), mu=0.0, max_response_length=8))
    assert (found["groups/equal"], found["groups/same_outcome"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
