"""The tables of rooms against the environment, and exact success against sampling."""

import gymnasium as gym
import numpy as np
import pytest

import spear_envs  # noqa: F401 - registers the environments
from benchmarks.lab.playing import Beginning, play_groups, tabulate_play
from benchmarks.lab.policy import BoardPolicy, Examiner, clone_expert
from benchmarks.lab.rooms import Rooms
from spear_envs.core.errors import SpearError
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.levels import WORDS
from spear_envs.sokoban.tasks import make_task_set

TURNS = 12


@pytest.fixture(scope="module")
def rooms() -> Rooms:
    tasks = make_task_set(Recipe(shortest=2, longest=7), "train")
    return Rooms.build([tasks[number] for number in range(24)])


def begin(rooms: Rooms, levels: np.ndarray) -> Beginning:
    none = np.full(len(levels), -1)
    return Beginning(levels, rooms.start[levels], np.full(len(levels), TURNS), none)


def test_rows_are_those_of_the_environment(rooms: Rooms) -> None:
    """Every episode is played again by the environment: rewards, wins, turns and states must be its own."""
    begun = begin(rooms, np.arange(len(rooms)))
    played = play_groups(rooms, BoardPolicy(rooms.cells), begun, 4, np.random.default_rng(3))
    names = [f"1-{number:05d}" for number in range(len(rooms))]
    records, rows = tabulate_play(rooms, begun, played, names, 4)
    assert len({record.won for record in records}) == 2, "wins and losses"
    env = gym.make("spear/Sokoban-v1", modality="text", shortest=2, longest=7, max_turns=TURNS).unwrapped
    step = 0
    for record in records:
        anchors: dict[object, str] = {}
        paid = 0.0
        env.reset(options={"task": record.task_id})
        for turn in range(record.turns):
            row, board = rows.take([step]), env.board
            inside = [board.codes[y * 6 + x] for y in range(1, 5) for x in range(1, 5)]
            assert row.ids[:-1].tolist() == inside and row.key[0] == f"{record.trajectory}_{turn}"
            assert anchors.setdefault(row.anchor[0], board.text()) == board.text()
            _, _, won, out_of_turns, info = env.step(env.parser.respond(WORDS[row.ids[-1]]))
            assert info["reward_terms"]["native_return"] - paid == pytest.approx(row.step_reward[0])
            paid = info["reward_terms"]["native_return"]
            step += 1
        assert (won, out_of_turns) == (record.won, not record.won)
        assert {key: info["reward_terms"][key] for key in record.terms} == pytest.approx(dict(record.terms))
        assert (info["tool_calls"], info["turn"]) == (record.tool_calls, record.turns)
    assert step == len(rows)


def test_success_is_what_sampling_finds(rooms: Rooms) -> None:
    policy = BoardPolicy(rooms.cells, seed=4)
    exact = Examiner(rooms, TURNS).examine(policy)
    levels = np.repeat(np.arange(len(rooms)), 400)
    played = play_groups(rooms, policy, begin(rooms, levels), 1, np.random.default_rng(0))
    sampled = played.won.reshape(-1, 400).mean(1)
    error = np.sqrt(exact * (1 - exact) / 400)
    assert (np.abs(sampled - exact) < 4 * error + 1e-9).all() and 0.02 < exact.mean() < 0.5
    assert (Examiner(rooms, 1).examine(policy) == 0).all(), "no level is one move long"


def test_the_start_reaches_the_success_that_was_asked_for(rooms: Rooms) -> None:
    examiner = Examiner(rooms, TURNS)
    first = examiner.examine(BoardPolicy(rooms.cells)).mean()
    made = clone_expert(rooms, examiner, first + 0.05, turns=TURNS, hidden=128)
    assert first + 0.05 <= examiner.examine(made).mean() < first + 0.25
    with pytest.raises(SpearError, match="untrained policy already wins"):
        clone_expert(rooms, examiner, first / 2, turns=TURNS, hidden=128)
    with pytest.raises(SpearError, match="ends at"):
        clone_expert(rooms, examiner, 0.9999, turns=TURNS, hidden=128)
