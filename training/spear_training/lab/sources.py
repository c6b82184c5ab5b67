"""In which states the groups of a step begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import numpy as np
from pydantic.dataclasses import dataclass as checked

from spear_training.algorithms.records import STRICT, Record, number
from spear_training.algorithms.rows import Array


class BranchMode(str, Enum):
    """Which states of earlier episodes are begun in."""

    SUCCESS = "success"
    """Of wins, backwards from the end, as far as groups still win (a reverse curriculum)."""
    NEAR_MISS = "near_miss"
    """Of losses: the last state that a win of the same task also passed through, or half-way where there is none."""


@checked(frozen=True, config=STRICT)
class BranchSettings(Record):
    """Groups that begin in a state of an earlier episode: all members in the same, so that advantages are of it."""

    PATH: ClassVar[str] = "branch"

    share: float = number(0.0, at_least=0, at_most=1)
    """Of the groups of a step; 0 switches branching off."""
    mode: BranchMode = BranchMode.SUCCESS
    capacity: int = number(256, at_least=1)
    """Episodes that are kept, the oldest leave first."""
    target: float = number(0.5, above=0, below=1)
    """Success at which a reverse curriculum goes one move further back."""


@dataclass(frozen=True)
class Beginning:
    """Where the G groups of a batch begin.

    Attributes:
        levels, states: [G].
        turns: [G] that are left, as after ``set_state`` of the environment.
        branch: [G] number of the remembered episode that a group begins in; -1 for the level's own start.
    """

    levels: Array
    states: Array
    turns: Array
    branch: Array


@dataclass
class _Past:
    """An episode: the states before each of its turns, whether it won, and how far back groups begin in it."""

    level: int
    states: list[int]
    used: int
    """Turns before its first state."""
    won: bool
    back: int = 1
    number: int = field(default=-1)


class Archive:
    """Earlier episodes as snapshots to begin in (``spear.branch``).

    Args:
        settings: of the branching.
        turns: of an episode from a task's own start.
    """

    def __init__(self, settings: BranchSettings, turns: int) -> None:
        self._settings, self._turns = settings, turns
        self._episodes: deque[_Past] = deque(maxlen=settings.capacity)
        self._count = 0

    def begin(self, levels: Array, starts: Array, rng: np.random.Generator) -> Beginning:
        """Where groups of these tasks begin; the first ``share`` of them in a snapshot, if there is one."""
        groups = len(levels)
        levels, states = levels.copy(), starts.copy()
        turns, branch = np.full(groups, self._turns), np.full(groups, -1)
        usable = [past for past in self._episodes if self._can_begin(past)]
        for place in range(round(self._settings.share * groups) if usable else 0):
            past = usable[int(rng.integers(len(usable)))]
            at = self._choose(past)
            levels[place], states[place], branch[place] = past.level, past.states[at], past.number
            turns[place] = self._turns - past.used - at
        return Beginning(levels, states, turns, branch)

    def _can_begin(self, past: _Past) -> bool:
        if self._settings.mode is BranchMode.SUCCESS:
            return past.won and past.back <= len(past.states)
        return not past.won

    def _choose(self, past: _Past) -> int:
        if self._settings.mode is BranchMode.SUCCESS:
            return len(past.states) - past.back
        passed = {state for one in self._episodes if one.won and one.level == past.level for state in one.states}
        shared = [at for at, state in enumerate(past.states) if state in passed]
        return shared[-1] if shared else len(past.states) // 2

    def tell(self, begun: Beginning, wins: Array, episodes: int) -> None:
        """Take in how groups went: a reverse curriculum goes one move back where enough of a group won."""
        known = {past.number: past for past in self._episodes}
        for one, won in zip(begun.branch.tolist(), wins.tolist(), strict=True):
            if one in known and won >= self._settings.target * episodes:
                known[one].back += 1

    def remember(self, level: int, states: Sequence[int], used: int, won: bool) -> None:
        """Keep an episode; ``used`` turns lie before its first state."""
        self._episodes.append(_Past(level, list(states), used, won, 1, self._count))
        self._count += 1

    @property
    def wants(self) -> tuple[bool, bool]:
        """Whether episodes that lost, and that won, are worth remembering."""
        some = self._settings.share > 0
        return some and self._settings.mode is not BranchMode.SUCCESS, some

    def state_dict(self) -> dict[str, Any]:
        """All snapshots."""
        return {"episodes": [vars(past).copy() for past in self._episodes], "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        self._episodes = deque((_Past(**past) for past in state["episodes"]), maxlen=self._settings.capacity)
        self._count = state["count"]
