"""Tasks of the batches: drawn by a curriculum, replaced by snapshots of earlier episodes, started ahead of a step."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from spear_agents.engines.base import derive_seed
from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import Layout, Trajectory
from spear_envs.core.errors import SpearError, name_error
from spear_envs.core.tasks import Task, canonical_json
from spear_training.algorithms.curriculum import Archive, BranchSettings, CurriculumSettings, TaskSource
from spear_training.algorithms.rows import Array
from spear_training.step.records import EpisodeRecord, Rollout, Walk

MOST_TASKS = 2**16
"""Maximum number of tasks with a posterior."""


def check_tasks(count: int, split: str) -> None:
    """Raise SpearError if ``count`` tasks are too many for a curriculum."""
    if count > MOST_TASKS:
        raise SpearError(f"curriculum.choice=thompson takes {MOST_TASKS:,} tasks, not {count:,}: set train.max_tasks")


def rate_difficulty(task: Task) -> Hashable:
    """Return the length of the shortest solution if the task states it, else its subtask: equal ones share evidence."""
    return task.content.get("optimal", task.subtask)


class Curriculum:
    """Draws the tasks of batches, and learns from their episodes."""

    def __init__(self, tasks: Sequence[Task], settings: CurriculumSettings, group: int, seed: int) -> None:
        self._ids = [task.id for task in tasks]
        self._digest = hashlib.sha256(canonical_json(self._ids).encode()).hexdigest()
        self._place = {name: number for number, name in enumerate(self._ids)}
        self._source = TaskSource([rate_difficulty(task) for task in tasks], settings, group)
        self._rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "curriculum")))

    def draw(self, count: int) -> list[str]:
        """Draw ids of ``count`` tasks, different if there are enough."""
        return [self._ids[number] for number in self._source.draw(count, self._rng)]

    def update(self, records: Iterable[EpisodeRecord]) -> None:
        """Update with episodes of groups, except those with a fault or from a snapshot."""
        groups: dict[str, list[EpisodeRecord]] = {}
        for record in records:
            # Wins from a snapshot say nothing about the task as a whole.
            if record.fault is None and record.began is None:
                groups.setdefault(record.group, []).append(record)
        found = list(groups.values())
        tasks = np.asarray([self._place[group[0].task_id] for group in found], dtype=np.int64)
        wins = np.asarray([sum(record.won for record in group) for group in found], dtype=np.int64)
        self._source.update(tasks, wins, [len(group) for group in found])

    def summarize(self) -> dict[str, float]:
        """Return metrics of the curriculum's estimates of its tasks, played or not."""
        rate, differ = self._source.estimate()
        known: Array = self._source.known
        return {
            "curriculum/success": float(rate.mean()),
            "curriculum/differing": float(differ.mean()),
            "curriculum/met": float(known.mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run to draw the same tasks."""
        return {"source": self._source.state_dict(), "rng": self._rng.bit_generator.state, "tasks": self._digest}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore :meth:`state_dict`. Raises SpearError if it is missing or of other tasks."""
        if state is None or state.get("tasks") != self._digest:  # counts are by the place of a task
            raise SpearError("the checkpoint is without this curriculum, or of other tasks: start a new run folder")
        try:
            self._source.load_state_dict(state["source"])
            self._rng.bit_generator.state = state["rng"]
        except (LookupError, TypeError, ValueError) as error:
            raise SpearError(f"the curriculum in the checkpoint is damaged ({name_error(error)})") from error


OFF = "or set branch.share=0"


def check_branching(*, layout: Layout, program: str | None, staleness: int, obstacle: str | None) -> None:
    """Raise SpearError, with the setting to change, if groups cannot start in snapshots."""
    if program is not None:
        raise SpearError(f"branch.share above 0 cannot start {program} in mid-episode: leave out rollout.agent, {OFF}")
    if layout is not Layout.PER_TURN:
        raise SpearError(f"branch.share above 0 needs env.layout=per_turn, not {layout.value}: set it, {OFF}")
    if staleness:
        raise SpearError(f"branch.share above 0 needs rollout.staleness=0, not {staleness}: set it, {OFF}")
    if obstacle is not None:
        raise SpearError(
            f"branch.share above 0 cannot restore states of this environment: {obstacle}. Change it, {OFF}"
        )


def list_walks(
    trajectories: Iterable[Trajectory], records: Iterable[EpisodeRecord], settings: BranchSettings
) -> dict[str, Walk]:
    """Return walks of a rollout for the archive, by episode: those from the start of their task."""
    walks = {}
    for trajectory, record in zip(trajectories, records, strict=True):
        if record.fault is None and record.began is None and settings.keeps(won=record.won):
            moments = trajectory.turns if settings.begins_in(won=record.won) else ()
            snapshots = tuple(turn.snapshot for turn in moments if turn.snapshot is not None)
            walks[record.trajectory] = Walk(tuple(turn.anchor for turn in trajectory.turns), snapshots)
    return walks


class Branching:
    """Chooses the groups of a batch that start in snapshots, and learns from their episodes."""

    def __init__(self, settings: BranchSettings, seed: int) -> None:
        self._archive: Archive[str, Snapshot] = Archive(settings)
        self._rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "branch")))
        self._begun: dict[str, int] = {}
        """Archived episode of each running group that started in it."""

    def begin(self, groups: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, Snapshot | None]]:
        """Return the task of each group, and its snapshot; groups with one come first, and the last tasks give way."""
        branches = self._archive.draw(len(groups), self._rng)
        self._begun |= {group: branch.episode for group, branch in zip(groups, branches, strict=False)}
        taken: list[tuple[str, Snapshot | None]] = [(branch.task, branch.state) for branch in branches]
        # A curriculum's first tasks are its best.
        return taken + [(task, None) for task in tasks[: len(tasks) - len(branches)]]

    def update(self, rollout: Rollout) -> None:
        """Update the archive with episodes without a fault."""
        wins: dict[int, list[bool]] = {}
        for record in rollout.records:
            # All groups that started in one episode together: it moves one turn back, however many they are.
            if record.group in self._begun and record.fault is None:
                wins.setdefault(self._begun[record.group], []).append(record.won)
        for episode, found in wins.items():
            # Before the new walks are kept: the archive may drop the oldest episodes for them.
            self._archive.update(episode, sum(found), len(found))
        for record in rollout.records:
            self._begun.pop(record.group, None)
        for record in rollout.records:
            walk = rollout.walks.get(record.trajectory)
            if walk is not None:
                self._archive.remember(record.task_id, walk.anchors, walk.snapshots, won=record.won)

    def summarize(self, records: Sequence[EpisodeRecord]) -> dict[str, float]:
        """Return metrics of the groups of a step that started in snapshots."""
        branched = [record for record in records if record.began is not None]
        groups = len({record.group for record in records})
        metrics = {
            "branch/share": len({record.group for record in branched}) / max(1, groups),
            "branch/kept": float(len(self._archive)),
        }
        valid = [record for record in branched if record.fault is None]
        if valid:
            metrics["branch/success"] = float(np.mean([record.won for record in valid]))
            metrics["branch/turns_before"] = float(np.mean([record.began for record in valid]))
            metrics["branch/turns"] = float(np.mean([record.turns for record in valid]))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run to make the same choices."""
        state = self._archive.state_dict()
        for past in state["episodes"]:
            past["states"] = _pack(past["states"])
        return {"archive": state, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore :meth:`state_dict`. Raises SpearError if it is missing or damaged."""
        if state is None:
            raise SpearError("the checkpoint was written without branches: start a new run folder")
        try:
            saved = state["archive"]
            episodes = [{**past, "states": _unpack(past["states"])} for past in saved["episodes"]]
            self._archive.load_state_dict({**saved, "episodes": episodes})
            self._rng.bit_generator.state = state["rng"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SpearError(f"the branches in the checkpoint are damaged ({name_error(error)})") from error
        self._begun = {}


def _pack(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Pack snapshots of an episode for a checkpoint, with their states as one array."""
    return {
        "turns": [one.turn for one in snapshots],
        "histories": [one.history for one in snapshots],
        "sizes": [len(one.state) for one in snapshots],
        "bytes": np.frombuffer(b"".join(one.state for one in snapshots), dtype=np.uint8),
    }


def _unpack(saved: Mapping[str, Any]) -> list[Snapshot]:
    ends = np.cumsum([0, *saved["sizes"]]).tolist()
    content = saved["bytes"].tobytes()
    if min(saved["sizes"], default=0) < 0 or ends[-1] != len(content):
        raise ValueError("sizes are not those of the states")
    histories = [tuple((seen, done) for seen, done in history) for history in saved["histories"]]
    return [
        Snapshot(turn, content[low:high], history)
        for turn, low, high, history in zip(saved["turns"], ends[:-1], ends[1:], histories, strict=True)
    ]


Playing = TypeVar("Playing")
Tasks = list[str]


class BatchesAhead(Generic[Playing]):
    """Starts batches before their steps: with ``lead`` N, those of the N steps after the present one.

    A batch starts at most N updates before its own step, so no token is more than N versions old. ``draw`` returns the
    tasks of the next batch; ``begin`` starts to play tasks as those of a step (from 1).
    """

    def __init__(self, lead: int, draw: Callable[[], Tasks], begin: Callable[[int, Tasks], Playing]) -> None:
        self._lead = lead
        self._draw = draw
        self._begin = begin
        self._drawn: deque[Tasks] = deque()
        self._batches: deque[tuple[Tasks, Playing]] = deque()

    def reach(self, step: int, last: int) -> None:
        """Start the missing batches of ``step`` and the following ones, up to step ``last``."""
        # Called once a step, before the step trains: the batch of step + lead starts on weights of step - 1 updates,
        # and is learnt from after at most lead further ones. No batch starts that no step would take.
        while len(self._batches) <= min(self._lead, last - step):
            tasks = self._drawn.popleft() if self._drawn else self._draw()
            self._batches.append((tasks, self._begin(step + len(self._batches), tasks)))

    def take(self) -> Playing:
        """Take the batch of the present step, in order of steps."""
        return self._batches.popleft()[1]

    def list_drawn(self) -> list[Tasks]:
        """Return tasks of all batches drawn but not taken, which a checkpoint keeps and a resumed run plays again."""
        return [tasks for tasks, _ in self._batches] + list(self._drawn)

    def restore(self, drawn: Iterable[Tasks]) -> None:
        """Play the tasks of :meth:`list_drawn` before drawing new ones."""
        self._drawn = deque(drawn)
