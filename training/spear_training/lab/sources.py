"""States of the lab's rooms in which the groups of a step start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spear_training.algorithms.branching import Branch
from spear_training.algorithms.rows import Array


@dataclass(frozen=True)
class Beginning:
    """States in which the G groups of a batch start.

    Attributes:
        levels, states: [G].
        turns: [G] that are left, as after ``set_state`` of the environment.
        began: [G] turns before the snapshot of a group; -1 for the level's own start.
    """

    levels: Array
    states: Array
    turns: Array
    began: Array

    @classmethod
    def of(cls, levels: Array, starts: Array, turns: int, branches: Sequence[Branch[int, int]]) -> Beginning:
        """Groups of these levels from their starts with ``turns`` turns; ``branches`` replace the first ones."""
        levels, states = levels.copy(), starts.copy()
        left, began = np.full(len(levels), turns), np.full(len(levels), -1)
        for place, branch in enumerate(branches):
            levels[place], states[place], began[place] = branch.task, branch.state, branch.turn
            left[place] = turns - branch.turn
        return cls(levels, states, left, began)
