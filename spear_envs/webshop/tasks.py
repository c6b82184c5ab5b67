"""Goals as tasks: ids, splits, fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spear_envs.core.tasks import NumberedTaskSet, Task, canonical_json
from spear_envs.webshop.goals import Goal, GoalSource
from spear_envs.webshop.splits import positions_to_json

NAME = "webshop"
BOUNDED = 100_000
"""Larger sets are not enumerated."""


@dataclass(frozen=True)
class GoalTask(Task):
    """A task with the goal that its content describes."""

    goal: Goal


def _read_key(task: Task) -> str:
    assert isinstance(task, GoalTask)
    return task.goal.key


class GoalTaskSet(NumberedTaskSet):
    """Goals of one split as tasks, made on demand.

    Ids are ``webshop/<split>/<index within the split>``, five digits or more.

    Args:
        source: all goals, in canonical order.
        positions: the positions of its goals in ``source``.
        world: fingerprint of the rest that a score depends on: products, prices, tagger.
    """

    def __init__(self, source: GoalSource, split: str, positions: Sequence[int], world: str) -> None:
        super().__init__(NAME, split, len(positions), digest=_read_key)
        self.bounded = len(positions) <= BOUNDED
        self._source = source
        self._positions = positions
        self._world = world

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

    def _definition(self) -> Any:
        positions = canonical_json(positions_to_json(self._positions)).encode()
        return {
            "name": NAME,
            "split": self.split,
            "goals": self._source.fingerprint,
            "positions": hashlib.sha256(positions).hexdigest(),
            "world": self._world,
        }
