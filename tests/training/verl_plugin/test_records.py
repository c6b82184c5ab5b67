from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.engines.base import Finish
from spear_agents.trajectory import Layout, StopReason, Trajectory, Turn
from spear_training.verl_plugin.records import EpisodeRecord, record_episode


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
    return Trajectory(layout=layout, turns=turns, **(fields | changes))


def record(trajectory: Trajectory, *, find_repetition: bool = False) -> EpisodeRecord:
    return record_episode(trajectory, "5-00002", 3, find_repetition=find_repetition)


def test_a_turn_is_a_row_of_its_own() -> None:
    made = record(make_trajectory(make_turn(0), make_turn(1, finish=Finish.LENGTH), make_turn(2, action="")))
    assert [row.key for row in made.rows] == ["5-00002_3_0", "5-00002_3_1", "5-00002_3_2"]
    assert [row.turn for row in made.rows] == [0, 1, 2]
    assert [row.prompt_length for row in made.rows] == [3, 1, 1]
    assert [row.response_length for row in made.rows] == [row.loss_tokens for row in made.rows] == [2, 2, 2]
    assert [row.finished for row in made.rows] == [True, False, True]
    assert [row.void for row in made.rows] == [False, False, True]
    assert [row.anchor for row in made.rows] == ["board0", "board1", "board2"]
    assert [row.step_reward for row in made.rows] == pytest.approx([-0.1, -0.2, -0.3])


def test_a_conversation_is_one_row_with_gaps_in_the_loss() -> None:
    made = record(make_trajectory(make_turn(0), make_turn(1, action=""), make_turn(2), layout=Layout.CONVERSATION))
    (row,) = made.rows
    assert row.key == "5-00002_3_0"
    assert (row.prompt_length, row.response_length, row.loss_tokens) == (3, 2 + 1 + 2 + 1 + 2, 6)
    assert row.void, "one void turn spoils the row it is in"
    assert row.finished and row.anchor == "board0"
    assert row.step_reward == pytest.approx(-0.6)


def test_a_conversation_is_finished_if_its_last_response_is() -> None:
    first, last = make_turn(0, finish=Finish.LENGTH), make_turn(1)
    assert record(make_trajectory(first, last, layout=Layout.CONVERSATION)).rows[0].finished
    cut = make_turn(1, finish=Finish.LENGTH)
    assert not record(make_trajectory(make_turn(0), cut, layout=Layout.CONVERSATION)).rows[0].finished


def test_an_episode_keeps_what_rewards_and_metrics_need() -> None:
    made = record(make_trajectory(make_turn(0), make_turn(1, format_ok=False, action_ok=False)))
    assert (made.group, made.sample, made.trajectory_id) == ("5-00002", 3, "5-00002_3")
    assert (made.task_id, made.subtask, made.won, made.score) == ("t/7", "long", True, 0.8)
    assert made.terms == {"outcome": 1.0, "tool_call": 0.3, "format": 0.1}
    assert (made.tool_calls, made.turns, made.well_formed_turns, made.valid_actions) == (3, 2, 1, 1)
    assert (made.stop, made.fault) == ("won", None)


def test_a_fault_is_recorded_with_its_kind() -> None:
    made = record(make_trajectory(make_turn(0), stop=StopReason.FAULT, fault="timeout", won=False))
    assert (made.stop, made.fault, len(made.rows)) == ("fault", "timeout", 1)


@pytest.mark.parametrize("layout", Layout)
def test_an_episode_without_a_turn_has_no_rows(layout: Layout) -> None:
    made = record(make_trajectory(layout=layout, stop=StopReason.CONTEXT_LIMIT, won=False))
    assert made.rows == () and made.turns == 0


def test_repetition_is_looked_for_where_it_matters() -> None:
    endless = make_turn(0, response_ids=tuple(range(20)) * 10, log_probs=(0.0,) * 200)
    trajectory = make_trajectory(endless, make_turn(1))
    assert [row.repetitive for row in record(trajectory, find_repetition=True).rows] == [True, False]
    assert [row.repetitive for row in record(trajectory).rows] == [False, False]


@pytest.mark.parametrize("layout", Layout)
def test_the_lengths_are_those_of_the_rows_that_are_written(layout: Layout) -> None:

    trajectory = make_trajectory(make_turn(0), make_turn(1), layout=layout)
    rows, made = trajectory.rows(), record(trajectory).rows
    assert [(r.prompt_length, r.response_length, r.loss_tokens) for r in made] == [
        (len(r.prompt_ids), len(r.response_ids), sum(r.response_mask)) for r in rows
    ]
