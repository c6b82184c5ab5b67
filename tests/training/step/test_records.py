"""Records of episodes as rows, and the metrics of a step."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from spear_agents.engines.base import Finish
from spear_agents.play.trajectory import Layout, StopReason, Trajectory, Turn
from spear_training.algorithms import RowTable, SpearSettings, is_incomplete, is_unreadable
from spear_training.step.plan import plan_rows
from spear_training.step.records import EpisodeRecord, Rollout, record_episode, tabulate
from spear_training.step.step import summarize_episodes, summarize_plan, summarize_rewards
from tests.training.episodes import Episode, make_episode, play


def make_turn(number: int, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "prompt_ids": (1, 2, 3) if number == 0 else (4,),
        "response_ids": (10 + number, 20),
        "log_probs": (-0.5, -0.1),
        "response": "x",
        "action": "up",
        "observation": "o",
        "format_ok": True,
        "action_ok": True,
        "anchor": f"board{number}",
        "reward": -0.1 * (number + 1),
        "finish": Finish.STOP,
    }
    return Turn(**(fields | changes))


def make_trajectory(*turns: Turn, layout: Layout = Layout.PER_TURN, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "env_id": "e",
        "task_id": "t/7",
        "subtask": "long",
        "instruction": "i",
        "fingerprint": "f",
        "reward_terms": {"outcome": 1.0, "tool_call": 0.3, "format": 0.1},
        "reward": 1.1,
        "score": 0.8,
        "won": True,
        "tool_calls": 3,
        "stop": StopReason.WON,
    }
    if layout is Layout.CONVERSATION:
        turns = tuple(replace(turn, follows=place - 1 if place else None) for place, turn in enumerate(turns))
    return Trajectory(layout=layout, turns=turns, **(fields | changes))


def record(trajectory: Trajectory) -> EpisodeRecord:
    return record_episode(trajectory, "5-00002", 3)


def list_rows(trajectory: Trajectory, **options: Any) -> RowTable:
    return tabulate([trajectory], [record(trajectory)], **options)


def test_a_turn_is_a_row_of_its_own() -> None:
    rows = list_rows(make_trajectory(make_turn(0), make_turn(1, finish=Finish.LENGTH), make_turn(2, action="")))
    assert rows.key.tolist() == ["5-00002_3_0", "5-00002_3_1", "5-00002_3_2"]
    assert rows.turn.tolist() == [0, 1, 2]
    assert rows.prompt_length.tolist() == [3, 1, 1]
    assert rows.response_length.tolist() == rows.loss_tokens.tolist() == [2, 2, 2]
    assert rows.finished.tolist() == [True, False, True]
    assert rows.void.tolist() == [False, False, True]
    assert rows.anchor.tolist() == ["board0", "board1", "board2"]
    assert rows.step_reward.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert rows.turns.tolist() == [1, 1, 1] and rows.turn_end.tolist() == [2, 2, 2]
    assert rows.ids.tolist() == [1, 2, 3, 10, 20, 4, 11, 20, 4, 12, 20] and rows.mask.all()


def test_a_conversation_is_one_row_with_gaps_in_the_loss() -> None:
    rows = list_rows(make_trajectory(make_turn(0), make_turn(1, action=""), make_turn(2), layout=Layout.CONVERSATION))
    assert rows.key.tolist() == ["5-00002_3_0"]
    assert (rows.prompt_length, rows.response_length, rows.loss_tokens) == (3, 2 + 1 + 2 + 1 + 2, 6)
    assert rows.void, "one void turn spoils the row it is in"
    assert rows.finished and rows.anchor == "board0"
    assert rows.step_reward == pytest.approx(-0.6)
    assert rows.mask.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    assert (rows.turns.tolist(), rows.turn_end.tolist()) == ([3], [2, 5, 8])
    assert rows.turn_reward.tolist() == pytest.approx([-0.1, -0.2, -0.3])


def test_turns_of_conversations_that_alternate_keep_their_places() -> None:
    """A planner writes turns 0 and 2, another conversation has turn 1: the last row does not have the last turn."""
    turns = (make_turn(0), make_turn(1, prompt_ids=(1, 2, 3)), make_turn(2, follows=0))
    rows = list_rows(make_trajectory(*turns))
    assert (rows.turns.tolist(), rows.turn_number.tolist()) == ([2, 1], [0, 2, 1])
    made = plan_rows(
        Rollout((record(make_trajectory(*turns)),), rows),
        SpearSettings.from_mapping({"filter": {"groups": 1.0}, "reward": {"failure": 0.0}}),
        mu=0.0,
        max_response_length=100,
    )
    assert (made.rows.turn_reward.tolist(), made.rows.step_reward.tolist()) == ([0.0, 1.0, 0.0], [1.0, 0.0])


@pytest.mark.parametrize("layout", Layout)
def test_an_episode_that_outgrew_the_context_says_so_in_its_rows(layout: Layout) -> None:
    ended = make_trajectory(make_turn(0), make_turn(1), layout=layout, stop=StopReason.CONTEXT_LIMIT, won=False)
    assert list_rows(ended).truncated.all() and list_rows(ended).finished.all()
    assert not list_rows(make_trajectory(make_turn(0), layout=layout)).truncated.any()


def test_an_episode_keeps_what_rewards_and_metrics_need() -> None:
    made = record(make_trajectory(make_turn(0), make_turn(1, format_ok=False, action_ok=False)))
    assert (made.group, made.sample, made.trajectory) == ("5-00002", 3, "5-00002_3")
    assert (made.task_id, made.subtask, made.won, made.score) == ("t/7", "long", True, 0.8)
    assert made.terms == {"outcome": 1.0, "tool_call": 0.3, "format": 0.1}
    assert (made.tool_calls, made.turns, made.well_formed_turns, made.valid_actions) == (3, 2, 1, 1)
    assert (made.stop, made.fault, made.rows) == ("won", None, 2)


def test_a_fault_is_recorded_with_its_kind_and_has_no_rows() -> None:
    broken = make_trajectory(make_turn(0), stop=StopReason.FAULT, fault="timeout", won=False)
    made = record(broken)
    assert (made.stop, made.fault, made.rows) == ("fault", "timeout", 0)
    assert not len(list_rows(broken))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e300])
def test_a_reward_that_is_no_number_is_a_fault_of_that_episode_alone(value: float) -> None:
    terms = make_trajectory(make_turn(0), reward_terms={"outcome": value, "tool_call": 0.0, "format": 0.0})
    assert record(terms).fault == record(make_trajectory(make_turn(0, reward=value))).fault == "reward"


@pytest.mark.parametrize("layout", Layout)
def test_an_episode_without_a_turn_has_no_rows(layout: Layout) -> None:
    empty = make_trajectory(layout=layout, stop=StopReason.CONTEXT_LIMIT, won=False)
    assert (record(empty).rows, record(empty).turns, len(list_rows(empty))) == (0, 0, 0)


def test_repetition_is_looked_for_where_it_matters() -> None:
    endless = make_turn(0, response_ids=tuple(range(20)) * 10, log_probs=(0.0,) * 200)
    trajectory = make_trajectory(endless, make_turn(1))
    assert list_rows(trajectory, find_repetition=True).repetitive.tolist() == [True, False]
    assert list_rows(trajectory).repetitive.tolist() == [False, False]


@pytest.mark.parametrize("text", ["caf\ufffd", "a\u00ef\u00bf\u00bdb", "\u00ef\u00bc\u0178"])
def test_characters_of_broken_bytes_make_a_row_unreadable(text: str) -> None:
    trajectory = make_trajectory(make_turn(0, response=f"<think>{text}</think>"), make_turn(1, format_ok=False))
    rows = list_rows(trajectory)
    assert rows.unreadable.tolist() == [True, False] and rows.malformed.tolist() == [0, 1]
    assert rows.incomplete.tolist() == [True, is_incomplete(make_turn(1).response)]
    assert not is_unreadable("caf\u00e9 \u00ef \uff1f \u4f60")


def test_who_played_what_changes_nothing() -> None:
    parts = []
    for group, sample in (("1-00001", 1), ("1-00000", 0), ("1-00001", 0)):
        trajectory = make_trajectory(make_turn(0), make_turn(1))
        made = record_episode(trajectory, group, sample)
        parts.append(Rollout((made,), tabulate([trajectory], [made]), 2))
    there, back = Rollout.join(parts), Rollout.join(parts[::-1])
    assert [r.trajectory for r in there.records] == ["1-00000_0", "1-00001_0", "1-00001_1"]
    assert (
        there.rows.key.tolist()
        == back.rows.key.tolist()
        == [f"{r.trajectory}_{n}" for r in there.records for n in (0, 1)]
    )
    assert there.generations == back.generations == 6 and there.records == back.records


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
        "mask/unreadable": 0.0,
        "mask/low_variance": 0.0,
        "groups/equal": 0.0,
        "groups/same_outcome": 0.0,
        "rows/total": 0.0,
        "rows/trained": 0.0,
    }


def test_rewards_are_means_over_what_counts() -> None:
    records = make_step()
    plan = plan_rows(play(records), SpearSettings(), mu=0.5, max_response_length=8)
    metrics = summarize_rewards(plan.rewards, play(records).records)
    assert metrics["reward/outcome"] == pytest.approx(1 / 3)
    assert metrics["reward/tool_call"] == pytest.approx(1.1 / 3)
    assert metrics["reward/format"] == pytest.approx(0.1)
    assert metrics["reward/total"] == pytest.approx(1 / 3 + 0.5 * 1.1 / 3 + 0.1)


def test_groups_of_one_outcome_are_counted_whatever_else_their_episodes_earned() -> None:
    malformed = {"terms": {"outcome": -1.0, "format": 0.0, "tool_call": 0.0}}
    records = [make_episode("a", n, won=n == 0) for n in range(3)]
    records += [make_episode("b", n, **(malformed if n == 0 else {})) for n in range(3)]
    records += [make_episode("c", n) for n in range(3)]
    found = summarize_plan(plan_rows(play(records), SpearSettings(), mu=0.0, max_response_length=8))
    assert (found["groups/equal"], found["groups/same_outcome"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>go</think><action>up</action>", False),
        ("no thought <action>up</action> and more", False),
        ("<action>a\nb</action>", False),
        ("<action>up</action></think>", True),
        ("<think>a</think><action>up", True),
        ("<Action>up</Action>", True),
        ("", True),
    ],
)
def test_a_row_is_incomplete_without_a_whole_action_after_its_thoughts(text: str, expected: bool) -> None:
    assert is_incomplete(text) == expected


def test_a_policy_that_repeats_itself_is_filtered_in_linear_time() -> None:
    start = time.process_time()
    assert is_incomplete("<action>" * 50_000)
    assert time.process_time() - start < 1
