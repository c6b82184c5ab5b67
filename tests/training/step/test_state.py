"""What a step keeps between launches: buffers, bounds, streams, and the curriculum."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task
from spear_training.algorithms import ReplayEntry, SpearSettings
from spear_training.algorithms.curriculum import CurriculumSettings
from spear_training.algorithms.replay import tabulate_entries
from spear_training.run.checkpoints import STATE, TENSORS
from spear_training.step.minibatches import deal_rows
from spear_training.step.records import EpisodeRecord
from spear_training.step.state import SpearState
from spear_training.step.tasks import Curriculum, check_tasks, rate_difficulty
from tests.training.episodes import make_episode


def choose(**nodes: Any) -> SpearSettings:
    small = {"replay": {"capacity": 8}, "baseline": {"capacity": 16}, "sil": {"trigger_ratio": 0.25}}
    return SpearSettings.from_mapping(small | nodes)


def fill(state: SpearState, count: int = 12) -> SpearState:
    """What some steps leave behind: rows, group means, and a stream that has moved."""
    if state.baseline is not None:
        state.baseline.extend([0.1 * n for n in range(5)])
    state.replay.add(
        ReplayEntry(
            prompt_ids=[1, 2],
            response_ids=[3, n],
            response_mask=[1, 1],
            old_log_probs=[-0.5, -0.1 * n],
            reward=1.0 + 0.1 * n,
            advantage=0.5,
            step=n % 3,
            trajectory_id=f"0/g_{n}",
        )
        for n in range(count)
    )
    deal_rows([range(20)], np.ones(20), count=5, shares=1, rng=state.rng)
    state.meet(["here", "there"])
    state.remember({"success/all": 0.25, "perf/step_seconds": 9.0})
    state.bounds = (0.25, 1.5)
    return state


def draw(state: SpearState) -> Any:
    """Everything that the next step would decide by chance."""
    deal = deal_rows([range(30), range(30, 40)], np.arange(40), count=5, shares=2, rng=state.rng)
    seeds = state.rng.integers(2**20, size=5).tolist()
    replay = state.replay.draw(state.baseline)
    rows = [(entry.trajectory_id, entry.response_ids.tolist()) for entry in replay.entries]
    return deal, seeds, rows, replay.advantages.tolist()


@pytest.mark.parametrize(
    "nodes", [{}, {"baseline": {"capacity": 0}}, {"replay": {"capacity": 8, "unit": "trajectory"}}]
)
def test_a_resumed_run_draws_what_the_other_would_have_drawn(tmp_path: Path, nodes: dict[str, Any]) -> None:
    state = fill(SpearState(choose(**nodes), seed=3))
    state.save(tmp_path / "global_step_4", {"step": 4})
    resumed = SpearState(choose(**nodes), seed=99)
    assert resumed.load(tmp_path / "global_step_4")["step"] == 4
    assert resumed.bounds == (0.25, 1.5)
    assert (resumed.baseline is None) == (state.baseline is None)
    if state.baseline is not None and resumed.baseline is not None:
        assert resumed.baseline.values == state.baseline.values
    assert len(resumed.replay) == len(state.replay) == 12
    assert resumed.metrics == {"success/all": 0.25}
    assert resumed.meet(["there", "beyond"]) == state.meet(["there", "beyond"]) == 0.5
    assert draw(resumed) == draw(state)
    assert {path.name for path in (tmp_path / "global_step_4").iterdir()} == {STATE, TENSORS}


def test_fixed_bounds_are_those_of_the_settings(tmp_path: Path) -> None:
    before, after = ({"cov": {"bounds": "fixed", "lower": low, "upper": 60.0}} for low in (1.0, 2.0))
    SpearState(choose(**before), seed=3).save(tmp_path, {})
    resumed = SpearState(choose(**after), seed=3)
    resumed.load(tmp_path)
    resumed.move_bounds((0.0, 0.0))
    assert resumed.bounds == (2.0, 60.0)


def test_the_seed_decides_and_saving_does_not_disturb(tmp_path: Path) -> None:
    one, same, other = (fill(SpearState(choose(), seed=seed)) for seed in (3, 3, 4))
    one.save(tmp_path, {})
    assert draw(one) == draw(same) != draw(other)


@pytest.mark.parametrize("name", [STATE, TENSORS])
def test_a_torn_file_is_told(tmp_path: Path, name: str) -> None:
    fill(SpearState(choose(), 0)).save(tmp_path, {})
    whole = (tmp_path / name).read_bytes()
    for size in (0, 100, len(whole) // 2):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(SpearError, match="cannot be read") as caught:
            SpearState(choose(), 0).load(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["baseline", "replay", "rng", "metrics", "anchors"])
@pytest.mark.parametrize("value", [3, "x", [None]])
def test_a_state_of_another_form_is_one_error(tmp_path: Path, part: str, value: Any) -> None:
    state = SpearState(choose(), 0)
    state.save(tmp_path, {})
    saved = json.loads((tmp_path / STATE).read_text())
    saved["state"][part] = value
    (tmp_path / STATE).write_text(json.dumps(saved))
    with pytest.raises(SpearError, match="damaged"):
        state.load(tmp_path)


def test_pictures_of_replayed_rows_come_back(tmp_path: Path) -> None:
    state = SpearState(choose(), 0)
    picture = np.arange(9, dtype=np.uint8)
    rows = tabulate_entries([ReplayEntry([1], [2], [1], [-0.5], 1.0, 0.5, 0, "t")] * 2)
    state.replay.add(rows.add(picture_bytes=[9, 9], pictures=np.tile(picture, 2)))
    state.save(tmp_path, {})
    resumed = SpearState(choose(), 0)
    resumed.load(tmp_path)
    drawn = resumed.replay.draw(None).rows
    assert [part.tolist() for part in drawn.split("pictures")] == [picture.tolist()] * 2


@pytest.mark.parametrize("node", ["baseline", "replay"])
def test_a_buffer_of_another_size_is_told(tmp_path: Path, node: str) -> None:
    SpearState(choose(), 0).save(tmp_path, {})
    with pytest.raises(SpearError, match=rf"{node}\.capacity"):
        SpearState(choose(**{node: {"capacity": 5}}), 0).load(tmp_path)


def test_a_save_that_breaks_off_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fill(SpearState(choose(), 0))
    state.save(tmp_path, {})
    before = (tmp_path / TENSORS).read_bytes()

    def break_off(value: Any, path: Path, about: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", break_off)
    with pytest.raises(SpearError, match="No space left"):
        state.save(tmp_path, {})
    assert (tmp_path / TENSORS).read_bytes() == before
    SpearState(choose(), 0).load(tmp_path)


def test_the_state_is_plain_data() -> None:
    # numpy's generator state and the buffers' tensors: nothing that ties a checkpoint to a class of this code.
    def walk(value: Any) -> set[type]:
        if isinstance(value, dict):
            return {kind for item in value.values() for kind in walk(item)}
        if isinstance(value, (list, tuple)):
            return {kind for item in value for kind in walk(item)}
        return {type(value)}

    kinds = walk(fill(SpearState(choose(), 0)).state_dict())
    assert kinds <= {int, float, str, bool, type(None), torch.Tensor}


def test_a_state_of_the_world_may_have_any_name() -> None:
    state = SpearState(choose(), 0)
    assert [state.meet(["a", "\ud800"]), state.meet(["\ud800", "b"])] == [1.0, 0.5]


def test_running_bounds_follow_and_frozen_ones_stay() -> None:
    running = SpearState(choose(cov={"momentum": 0.5}), 0)
    frozen = SpearState(choose(cov={"bounds": "percentile"}), 0)
    fixed = SpearState(choose(cov={"bounds": "fixed", "lower": 1, "upper": 40}), 0)
    for state in (running, frozen, fixed):
        state.move_bounds((0.2, 2.0))
        state.move_bounds((0.4, 1.0))
    assert running.bounds == pytest.approx((0.3, 1.5))
    assert frozen.bounds == (0.2, 2.0) and fixed.bounds == (1.0, 40.0)


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
        whole.update(play(whole.draw(3), (0, 2, 4)))
    saved = json.loads(json.dumps(whole.state_dict()))
    rest = []
    for _ in range(5):
        rest.append(whole.draw(3))
        whole.update(play(rest[-1], (1, 2, 0)))
    resumed = open_curriculum(seed=99)
    resumed.load_state_dict(saved)
    for drawn in rest:
        assert resumed.draw(3) == drawn
        resumed.update(play(drawn, (1, 2, 0)))
    assert resumed.summarize() == whole.summarize()
    again, other = open_curriculum(), open_curriculum(seed=4)
    assert [again.draw(3) for _ in range(4)] != [other.draw(3) for _ in range(4)], "a run's own seed"
    others = [replace(task, id=f"other/{task.id}") for task in TASKS]
    for state in (None, *(open_curriculum(tasks=tasks).state_dict() for tasks in (TASKS[:11], others))):
        with pytest.raises(SpearError, match="without this curriculum"):
            resumed.load_state_dict(state)


def test_a_damaged_curriculum_is_one_error() -> None:
    saved = open_curriculum().state_dict()
    for damage in ({"source": None}, {"source": {}}, {"rng": None}):
        with pytest.raises(SpearError, match="damaged"):
            open_curriculum().load_state_dict(saved | damage)


def test_a_curriculum_has_tasks() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        open_curriculum(tasks=[])


def test_faults_say_nothing_of_a_task() -> None:
    some, none = open_curriculum(), open_curriculum()
    some.update(play(["t/train/5"], [1], faults=2))
    none.update(play(["t/train/5"], [0], faults=4))
    assert some.state_dict()["source"]["wins"][5] == 1 and some.state_dict()["source"]["losses"][5] == 1
    assert none.summarize()["curriculum/met"] == 0 and some.summarize()["curriculum/met"] == 1 / 12
    assert some.summarize()["curriculum/success"] == pytest.approx(0.5)
    none.update([])


def test_difficulty_is_the_length_of_a_solution_or_the_subtask() -> None:
    assert rate_difficulty(Task("a", "train", "len 3-6", "", {"optimal": 5})) == 5
    assert rate_difficulty(TASKS[4]) == "kind 1"


def test_a_split_without_end_needs_a_limit() -> None:
    check_tasks(2**16, "train")
    with pytest.raises(SpearError, match=r"set train\.max_tasks"):
        check_tasks(2**16 + 1, "train")
