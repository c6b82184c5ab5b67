"""Starts of groups: tasks chosen by a curriculum, and states of earlier episodes (``branch``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic.dataclasses import dataclass as checked

from spear_training.algorithms.rows import Array
from spear_training.algorithms.schema import STRICT, Record, number


class Choice(str, Enum):
    """Choice of the tasks of a step."""

    UNIFORM = "uniform"
    """Each once, in random order, then all again."""
    THOMPSON = "thompson"
    """Tasks whose groups are likely to differ, by draws from the posterior of each task's success."""


@checked(frozen=True, config=STRICT)
class CurriculumSettings(Record, path="curriculum"):
    """Which tasks are drawn."""

    choice: Choice = Choice.UNIFORM
    """uniform: in random order; thompson: those whose groups are likely to differ."""
    forget: float = number(0.9, above=0, at_most=1)
    """Factor of a task's old counts when new ones are added, since the policy has changed."""
    prior: float = number(4.0, above=0)
    """Weight of the success of tasks of equal difficulty, in episodes."""


class TaskSource:
    """Draws tasks, and learns from their results.

    Thompson sampling: a success rate is drawn for each task from its Beta posterior, and the tasks with the highest
    probability that a group of ``group`` episodes differs are taken. The prior of a task comes from those of equal
    difficulty.

    Args:
        difficulties: of the tasks, [N]; equal ones share evidence.
        settings: of the curriculum.
        group: episodes of a group.
    """

    def __init__(self, difficulties: Sequence[Hashable], settings: CurriculumSettings, group: int) -> None:
        if not len(difficulties):
            raise ValueError("a curriculum needs at least one task")
        self._settings, self._group = settings, group
        places: dict[Hashable, int] = {}
        self._bands = np.asarray([places.setdefault(one, len(places)) for one in difficulties])
        self._wins, self._losses = np.zeros((2, len(self._bands)))
        self._order: list[int] = []

    @property
    def known(self) -> Array:
        """Flags of played tasks [N]."""
        return (self._wins + self._losses) > 0

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Draw numbers of ``count`` tasks [count], different if there are enough."""
        size = len(self._bands)
        if self._settings.choice is Choice.UNIFORM:
            # Permutation after permutation, carried over from step to step: every task is played before one is played
            # again.
            while len(self._order) < count:
                self._order += rng.permutation(size).tolist()
            drawn, self._order = self._order[:count], self._order[count:]
            return np.asarray(drawn)
        prior, mean = self._settings.prior, self._pool()
        # Thompson sampling: a task is drawn as often as it may be the best one, so that uncertain tasks are tried, too.
        rate = rng.beta(self._wins + prior * mean, self._losses + prior * (1.0 - mean))
        # Noise far below any difference of probabilities breaks ties, which are common among unplayed tasks.
        best = np.argsort(-(self._differ(rate) + 1e-9 * rng.random(size)), kind="stable")
        # With fewer tasks than groups, the best tasks come again.
        return np.resize(best[:count], count)

    def update(self, tasks: Array, wins: Array, episodes: ArrayLike) -> None:
        """Add results of groups from the start of their tasks: ``wins`` [G] of ``episodes``, [G] or one for all."""
        keep, played = self._settings.forget, np.broadcast_to(np.asarray(episodes), len(tasks))
        for task, won, count in zip(tasks.tolist(), wins.tolist(), played.tolist(), strict=True):
            # Counts fade with each new result of their task: the success of an older policy says less.
            self._wins[task] = keep * self._wins[task] + won
            self._losses[task] = keep * self._losses[task] + count - won

    def estimate(self) -> tuple[Array, Array]:
        """Return the expected success of each task, and the probability that a group of it differs: [N] each."""
        prior, mean = self._settings.prior, self._pool()
        rate = (self._wins + prior * mean) / (self._wins + self._losses + prior)
        return rate, self._differ(rate)

    def _pool(self) -> Array:
        """Return the success rate of all tasks of each task's difficulty [N]."""
        wins, losses = (np.bincount(self._bands, weights=counts) for counts in (self._wins, self._losses))
        # An unknown difficulty starts at one half, and so is explored.
        return ((wins + 0.5) / (wins + losses + 1.0))[self._bands]

    def _differ(self, rate: Array) -> Array:
        # One minus the probabilities that all of a group win and that all lose: only then are advantages not all zero.
        return 1.0 - rate**self._group - (1.0 - rate) ** self._group

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence and the tasks that remain."""
        return {"wins": self._wins.tolist(), "losses": self._losses.tolist(), "order": list(self._order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._wins, self._losses = np.asarray(state["wins"]), np.asarray(state["losses"])
        self._order = list(state["order"])


Task = TypeVar("Task", bound=Hashable)
State = TypeVar("State")


class BranchMode(str, Enum):
    """States of earlier episodes in which groups start."""

    SUCCESS = "success"
    """States of wins, from the end backwards as long as groups win (a reverse curriculum)."""
    NEAR_MISS = "near_miss"
    """States of losses: the last state shared with a win of the same task, or half-way if there is none."""


@checked(frozen=True, config=STRICT)
class BranchSettings(Record, path="branch"):
    """Groups that start in a state of an earlier episode, the same for all members, so that advantages refer to it."""

    share: float = number(0.0, at_least=0, at_most=1)
    """Share of the groups of a step, at least one; 0 switches branching off."""
    mode: BranchMode = BranchMode.SUCCESS
    """success: states of wins, from their end backwards; near_miss: states of losses."""
    capacity: int = number(256, at_least=1)
    """Maximum number of episodes; the oldest are dropped first."""
    target: float = number(0.5, above=0, below=1)
    """Success at which a reverse curriculum moves one step back."""

    def keeps(self, *, won: bool) -> bool:
        """Return whether episodes with this end are kept."""
        return self.share > 0 and (won or self.mode is BranchMode.NEAR_MISS)

    def begins_in(self, *, won: bool) -> bool:
        """Return whether groups start in states of episodes with this end; others only need the names of states."""
        return self.share > 0 and won is (self.mode is BranchMode.SUCCESS)


@dataclass
class _Past(Generic[Task, State]):
    """An episode: the states before its turns, their names, whether it won, and how far back groups start in it."""

    number: int
    task: Task
    anchors: list[Hashable]
    states: list[State]
    won: bool
    back: int = 1

    def __post_init__(self) -> None:
        if self.back < 1 or len(self.states) not in (0, len(self.anchors)):
            raise ValueError("an episode has a state before each of its turns or none, and groups begin before its end")


@dataclass(frozen=True)
class Branch(Generic[Task, State]):
    """The state in which a group starts: before turn ``turn`` (from 0) of the archived episode ``episode``."""

    episode: int
    task: Task
    turn: int
    state: State


class Archive(Generic[Task, State]):
    """Snapshots of earlier episodes that started at the start of their task."""

    def __init__(self, settings: BranchSettings) -> None:
        self._settings = settings
        self._episodes: deque[_Past[Task, State]] = deque(maxlen=settings.capacity)
        self._count = 0

    def __len__(self) -> int:
        return len(self._episodes)

    def draw(self, groups: int, rng: np.random.Generator) -> list[Branch[Task, State]]:
        """Draw states for the first of ``groups`` groups: ``share`` of them, at least one; none without states."""
        reverse = self._settings.mode is BranchMode.SUCCESS
        usable = [
            past
            for past in self._episodes
            if self._settings.begins_in(won=past.won) and (past.back if reverse else 1) <= len(past.states)
        ]
        return [
            self._choose(usable[int(rng.integers(len(usable)))])
            for _ in range(max(1, round(self._settings.share * groups)) if usable else 0)
        ]

    def _choose(self, past: _Past[Task, State]) -> Branch[Task, State]:
        # From the end backwards: the last moves are learnt first, where a reward is near.
        turn = len(past.states) - past.back
        if self._settings.mode is BranchMode.NEAR_MISS:
            # The last state that a win of the task also passed is where the two parted: from there the task can still
            # be won, and what went wrong lies ahead.
            wins = (one for one in self._episodes if one.won and one.task == past.task)
            passed = {anchor for one in wins for anchor in one.anchors}
            shared = [at for at, anchor in enumerate(past.anchors) if anchor in passed]
            turn = shared[-1] if shared else len(past.states) // 2
        return Branch(past.number, past.task, turn, past.states[turn])

    def update(self, episode: int, wins: float, played: int) -> None:
        """Record the result of a group from ``episode``: if enough of it won, the next starts one move earlier."""
        for past in self._episodes:
            # Only once groups win from here: further back they would soon lose as often as from the start.
            if past.number == episode and played and wins >= self._settings.target * played:
                past.back += 1

    def remember(self, task: Task, anchors: Sequence[Hashable], states: Sequence[State], *, won: bool) -> None:
        """Keep an episode from the start of its task, if the settings keep those with its end.

        Args:
            task: of the episode.
            anchors: names of the states before each of its turns, equal for equal states of a task.
            states: these states; may be empty if no group starts in them.
            won: its end.
        """
        if self._settings.keeps(won=won):
            self._episodes.append(_Past(self._count, task, list(anchors), list(states), won))
            self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots."""
        return {"episodes": [vars(past).copy() for past in self._episodes], "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises LookupError, TypeError or ValueError if it is damaged."""
        self._episodes = deque((_Past(**past) for past in state["episodes"]), maxlen=self._settings.capacity)
        self._count = state["count"]
