"""Goals as tasks: ids, splits, fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spear_envs.core.tasks import Task, TaskSet, canonical_json
from spear_envs.webshop.goals import Goal, GoalSource
from spear_envs.webshop.splits import positions_to_json

__all__ = ["GoalTask", "GoalTaskSet"]

NAME = "webshop"
DIGITS = 5
CACHE_SIZE = 1_024
BOUNDED = 100_000
"""Larger sets are not to be looked at one by one."""


@dataclass(frozen=True)
class GoalTask(Task):
    """A task with the goal that its content describes."""

    goal: Goal


class GoalTaskSet(TaskSet):
    """Goals of one split as tasks, each made when it is asked for.

    Ids are ``webshop/<split>/<index within the split>``, five digits or more.

    Args:
        source: all goals, in canonical order.
        split: name of the split.
        positions: the positions of its goals in ``source``.
        world: fingerprint of all else that a score hangs on: products, prices, tagger.
    """

    def __init__(self, source: GoalSource, split: str, positions: Sequence[int], world: str) -> None:
        super().__init__(NAME, split, lambda task: task.goal.key)  # type: ignore[attr-defined]
        self.bounded = len(positions) <= BOUNDED
        self._source = source
        self._positions = positions
        self._world = world
        # Threads share a set: no cache of our own, whose order two of them could change at once.
        self._recall = lru_cache(maxsize=CACHE_SIZE)(self._make_task)

    def __len__(self) -> int:
        return len(self._positions)

    def id_of(self, index: int) -> str:
        """Id of the task at ``index``, without making the task."""
        return f"{NAME}/{self.split}/{index:0{DIGITS}d}"

    def _task_at(self, index: int) -> GoalTask:
        return self._recall(index)

    def _make_task(self, index: int) -> GoalTask:
        goal = self._source.goal(self._positions[index])
        return GoalTask(
            id=self.id_of(index),
            split=self.split,
            subtask=goal.category or "other",
            instruction=goal.instruction,
            content=goal.to_row(),
            goal=goal,
        )

    def index_of(self, task_id: str) -> int:
        """Position of a task; raises ``UnknownTaskError``."""
        number = task_id.rpartition("/")[2] if isinstance(task_id, str) else ""
        if number.isascii() and number.isdigit() and len(number) <= max(DIGITS, len(str(len(self)))):
            index = int(number)
            if index < len(self) and self.id_of(index) == task_id:
                return index
        raise self._unknown(task_id, "")

    def _definition(self) -> Any:
        positions = canonical_json(positions_to_json(self._positions)).encode()
        return {
            "name": NAME,
            "split": self.split,
            "goals": self._source.fingerprint,
            "positions": hashlib.sha256(positions).hexdigest(),
            "world": self._world,
        }
