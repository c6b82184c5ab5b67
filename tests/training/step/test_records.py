from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from spear_agents.engines.base import Finish
from spear_agents.trajectory import Layout, StopReason, Trajectory, Turn
from spear_training.algorithms import RowTable
from spear_training.step.records import EpisodeRecord, Rollout, record_episode, tabulate


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


def test_a_conversation_is_finished_if_its_last_response_is() -> None:
    first, last = make_turn(0, finish=Finish.LENGTH), make_turn(1)
    assert list_rows(make_trajectory(first, last, layout=Layout.CONVERSATION)).finished
    cut = make_turn(1, finish=Finish.LENGTH)
    assert not list_rows(make_trajectory(make_turn(0), cut, layout=Layout.CONVERSATION)).finished


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_a_fault_of_that_episode_alone(value: float) -> None:
    terms = make_trajectory(make_turn(0), reward_terms={"outcome": value, "tool_call": 0.0, "format": 0.0})
    assert record(terms).fault == record(make_trajectory(make_turn(0, reward=value))).fault == "reward"


@pytest.mark.parametrize("layout", Layout)
def test_the_tokens_are_those_of_the_trajectorys_rows(layout: Layout) -> None:
    trajectory = make_trajectory(make_turn(0), make_turn(1), layout=layout)
    wanted, rows = trajectory.rows(), list_rows(trajectory)
    ids, masks, logs = (rows.split(name) for name in ("ids", "mask", "rollout_log_probs"))
    for n, row in enumerate(wanted):
        assert ids[n].tolist() == [*row.prompt_ids, *row.response_ids]
        assert masks[n].tolist() == [bool(on) for on in row.response_mask]
        assert logs[n].tolist() == pytest.approx(list(row.log_probs))


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
