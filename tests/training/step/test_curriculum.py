"""The tasks of a training's steps: drawn, learnt from, saved and gone on with."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task
from spear_training.algorithms.curriculum import CurriculumSettings
from spear_training.step.curriculum import Curriculum, check_tasks, rate_difficulty
from spear_training.step.records import EpisodeRecord
from tests.training.episodes import make_episode

THOMPSON = CurriculumSettings.from_mapping({"choice": "thompson"})
TASKS = [Task(f"t/train/{n}", "train", f"kind {n % 3}", "", {}) for n in range(12)]


def open_curriculum(seed: int = 3, tasks: Sequence[Task] = TASKS) -> Curriculum:
    return Curriculum(tasks, THOMPSON, 4, seed)


def play(tasks: Sequence[str], wins: Sequence[int], faults: int = 0) -> list[EpisodeRecord]:
    """Four episodes of each task; the last ``faults`` of a group were cut short."""
    return [
        make_episode(
            f"1-{g:05d}", n, won=n < won, task_id=task, fault="backend" if n >= 4 - faults else None
        ).record
        for g, (task, won) in enumerate(zip(tasks, wins, strict=True))
        for n in range(4)
    ]  # fmt: skip


def test_a_resumed_curriculum_draws_what_it_would_have_drawn() -> None:
    whole = open_curriculum()
    for _ in range(5):
        whole.tell(play(whole.draw(3), (0, 2, 4)))
    saved = json.loads(json.dumps(whole.state_dict()))
    rest = []
    for _ in range(5):
        rest.append(whole.draw(3))
        whole.tell(play(rest[-1], (1, 2, 0)))
    resumed = open_curriculum(seed=99)
    resumed.load_state_dict(saved)
    for drawn in rest:
        assert resumed.draw(3) == drawn
        resumed.tell(play(drawn, (1, 2, 0)))
    assert resumed.summarize() == whole.summarize()
    again, other = open_curriculum(), open_curriculum(seed=4)
    assert [again.draw(3) for _ in range(4)] != [other.draw(3) for _ in range(4)], "a run's own seed"
    for state in (None, open_curriculum(tasks=TASKS[:11]).state_dict()):
        with pytest.raises(SpearError, match="without this curriculum"):
            resumed.load_state_dict(state)


def test_faults_say_nothing_of_a_task() -> None:
    some, none = open_curriculum(), open_curriculum()
    some.tell(play(["t/train/5"], [1], faults=2))
    none.tell(play(["t/train/5"], [0], faults=4))
    assert some.state_dict()["source"]["wins"][5] == 1 and some.state_dict()["source"]["losses"][5] == 1
    assert none.summarize()["curriculum/met"] == 0 and some.summarize()["curriculum/met"] == 1 / 12
    assert some.summarize()["curriculum/success"] == pytest.approx(0.5)
    none.tell([])


def test_difficulty_is_the_length_of_a_solution_or_the_subtask() -> None:
    assert rate_difficulty(Task("a", "train", "len 3-6", "", {"optimal": 5})) == 5
    assert rate_difficulty(TASKS[4]) == "kind 1"


def test_a_split_without_end_needs_a_limit() -> None:
    check_tasks(2**16, "train")
    with pytest.raises(SpearError, match=r"set data\.train_max_samples"):
        check_tasks(2**16 + 1, "train")
