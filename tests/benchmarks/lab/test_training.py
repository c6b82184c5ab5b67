"""Trainings of the lab: the arms of the paper, what a source learns, what a branch begins in, and going on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lab.comparison import Arm, TrainingSettings
from benchmarks.lab.controls import weigh_positive
from benchmarks.lab.playing import Beginning
from benchmarks.lab.policy import BoardPolicy, Examiner
from benchmarks.lab.rooms import Rooms
from benchmarks.lab.training import Training, train
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.tasks import make_task_set
from spear_training.algorithms import policy_loss
from spear_training.algorithms.branching import Branch

SETTINGS = TrainingSettings(
    levels=16, tasks=4, group=4, turns=8, minibatch=64, budget=900, spear={"replay": {"capacity": 8}}
)


@pytest.fixture(scope="module")
def rooms() -> Rooms:
    tasks = make_task_set(Recipe(shortest=2, longest=7), "train")
    return Rooms.build([tasks[number] for number in range(16)])


def make(rooms: Rooms, seed: int = 0, rate: float = 2e-3, **arm: Any) -> Training:
    return Training(rooms, BoardPolicy(rooms.cells, 16), Arm.from_mapping(arm), SETTINGS, rate=rate, seed=seed)


def weights(training: Training) -> torch.Tensor:
    return torch.cat([value.flatten() for value in training.policy.state_dict().values()])


def steps(training: Training, count: int) -> list[Any]:
    return [training.step() for _ in range(count)]


EVERYTHING = {
    "algorithm": "grpo_spear",
    "branch": {"share": 0.5, "mode": "success", "target": 0.25},
    "curriculum": {"choice": "thompson"},
    "spear": {"sampling": {"enabled": True, "max_rounds": 2}},
}


def test_a_saved_training_goes_on_exactly(rooms: Rooms) -> None:
    whole = make(rooms, **EVERYTHING)
    first = steps(whole, 3)
    saved = copy.deepcopy(whole.state_dict())
    rest = steps(whole, 3)
    resumed = make(rooms, seed=99, **EVERYTHING)
    resumed.load_state_dict(saved)
    assert steps(resumed, 3) == rest and torch.equal(weights(resumed), weights(whole))
    assert whole.restored > 0 and any("replay/drawn" in line.metrics for line in [*first, *rest])
    assert steps(make(rooms, **EVERYTHING), 3) == first, "the same seed, the same run"
    assert steps(make(rooms, seed=1, **EVERYTHING), 3) != first


def test_spear_with_a_decay_of_no_steps_is_self_imitation_alone(rooms: Rooms) -> None:
    imitation = make(rooms, algorithm="grpo_sil")
    none, some = (make(rooms, algorithm="grpo_spear", spear={"reward": {"decay_steps": decay}}) for decay in (0, 100))
    for training in (imitation, none, some):
        steps(training, 4)
    assert torch.equal(weights(none), weights(imitation)) and not torch.equal(weights(some), weights(imitation))


def test_a_second_epoch_and_the_weight_of_wins_change_the_step(rooms: Rooms) -> None:
    plain, twice, positive = (
        make(rooms),
        make(rooms, epochs=2),
        make(rooms, spear={"loss": {"policy": "benchmarks.lab.controls:weigh_positive"}}),
    )
    for training in (plain, twice, positive):
        steps(training, 2)
    assert not torch.equal(weights(plain), weights(twice)) and not torch.equal(weights(plain), weights(positive))


def test_positive_advantages_alone_are_weighted() -> None:
    logs, advantages, on = torch.tensor([[-1.0], [-2.0]]), torch.tensor([2.0, -2.0]), torch.ones(2, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "max_log_ratio": None}
    plain, weighted = policy_loss(logs, logs, advantages, on), weigh_positive(logs, logs, advantages, on, **clip)
    assert weighted.loss.flatten().tolist() == [1.5 * float(plain.loss[0]), float(plain.loss[1])]


def test_a_result_tells_what_was_done(rooms: Rooms) -> None:
    training = make(rooms, branch={"share": 0.5})
    examiner = Examiner(rooms, SETTINGS.turns)
    result = train(training, examiner, looks=20, budget=SETTINGS.budget)
    assert len(result["curve"]) == 20 > training.steps, "a step may pass several looks at once"
    assert result["curve"][-1][0] == result["tokens"] >= SETTINGS.budget
    assert result["success"] == pytest.approx(examiner.examine(training.policy).mean())
    assert np.mean(result["won"]) / 1000 == pytest.approx(result["success"], abs=1e-3)
    assert result["steps"] == training.steps and training.finished


# ---- where a group begins --------------------------------------------------------------------------------------------
def test_members_of_a_branched_group_share_their_state(rooms: Rooms) -> None:
    """The anchors of the first rows of a group are one state, so that its advantages are of that state."""
    training = make(rooms, branch={"share": 1.0, "target": 0.1})
    seen: list[Any] = []
    hold = training._actor.hold
    training._actor.hold = lambda rows: seen.append(rows) or hold(rows)  # type: ignore[method-assign]
    steps(training, 6)
    rows = next(rows for rows in reversed(seen) if "replay_0_0" not in rows.key)
    first = rows.take(rows.turn == 0)
    for group in set(first.group):
        assert len(set(first.anchor[first.group == group])) == 1
    assert training.restored > 0


def test_turns_that_were_used_before_a_snapshot_stay_used() -> None:
    branches = [Branch(5, 3, 2, 12), Branch(6, 4, 0, 40)]
    begun = Beginning.of(np.asarray([7, 8, 9]), np.asarray([70, 80, 90]), 8, branches)
    assert (begun.levels.tolist(), begun.states.tolist()) == ([3, 4, 9], [12, 40, 90])
    assert (begun.turns.tolist(), begun.began.tolist()) == ([6, 8, 8], [2, 0, -1])
