"""Sokoban rooms of one box as tables: many parallel episodes, and success without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task
from spear_envs.sokoban.engine import MOVE_REWARD, WIN_REWARD
from spear_envs.sokoban.levels import BELOW, BOX, PLAYER, PLAYER_ON_TARGET, TARGET, WALL
from spear_envs.sokoban.tasks import read_level
from spear_training.algorithms.rows import Array

MOVES = 4
"""Up, down, left, right, as in :data:`spear_envs.sokoban.levels.WORDS`."""
CODES = 7
FAR = 255


@dataclass(frozen=True, eq=False)
class Rooms:
    """L levels of one size. A state is a number below S = C^2: cell of the player times C plus cell of the box.

    C counts the cells inside the border wall.

    Attributes:
        tasks: of the tables.
        start: [L] initial state of an episode.
        after: [L, S, 4] state after a move; won states are absorbing.
        moved: [L, S, 4] whether the move moved the player.
        won: [L, S].
        floor: [L, C] codes of the cells without player and box.
    """

    tasks: tuple[Task, ...]
    start: Array
    after: Array
    moved: Array
    won: Array
    floor: Array

    @classmethod
    def build(cls, tasks: Sequence[Task]) -> Rooms:
        """Tabulate the levels of ``tasks``. Raises SpearError unless all have one box and the same size."""
        levels = [read_level(task.content["level"]) for task in tasks]
        if not levels or {len(level.boxes) for level in levels} != {1} or len({level.width for level in levels}) != 1:
            raise SpearError("the lab plays rooms of one size with one box: change height, width and boxes")
        height, width = levels[0].height, levels[0].width
        inside = np.asarray([y * width + x for y in range(1, height - 1) for x in range(1, width - 1)])
        number = np.full(height * width, 0)
        number[inside] = np.arange(len(inside))
        size = len(inside)
        states = np.arange(size * size)
        player, box = inside[states // size], inside[states % size]
        wall = np.asarray([level.codes for level in levels]) == WALL
        won = box[None] == np.asarray([level.targets[0] for level in levels])[:, None]
        after = np.empty((len(levels), len(states), MOVES), dtype=np.int16)
        moved = np.empty(after.shape, dtype=bool)
        for move, step in enumerate((-width, width, -1, 1)):
            to = player + step
            push = to == box
            # A box at the border is next to a wall; the clip only keeps the index inside the board.
            beyond = np.clip(box + step, 0, height * width - 1)
            free = ~wall[:, to] & ~(push & wall[:, beyond]) & ~won
            moved[..., move] = free
            pushed = np.where(push, beyond, box)
            after[..., move] = np.where(free, number[to] * size + number[pushed], states)
        below = np.asarray([[BELOW[code] for code in level.codes] for level in levels], dtype=np.uint8)
        start = [number[level.player] * size + number[level.boxes[0]] for level in levels]
        return cls(tuple(tasks), np.asarray(start), after, moved, won, below[:, inside])

    def __len__(self) -> int:
        return len(self.start)

    @property
    def cells(self) -> int:
        """C."""
        return self.floor.shape[1]

    def observe(self, levels: Array, states: Array) -> Array:
        """Codes of the cells [B, C] of unfinished states."""
        codes, places = self.floor[levels], np.arange(len(levels))
        player, box = states // self.cells, states % self.cells
        codes[places, player] = np.where(codes[places, player] == TARGET, PLAYER_ON_TARGET, PLAYER)
        codes[places, box] = BOX
        return codes

    def pay(self, levels: Array, states: Array) -> Array:
        """Reward of a move that led to these states [B]: the cost of a move, and 1 for a box in place."""
        return MOVE_REWARD + np.where(self.won[levels, states], 1.0 + WIN_REWARD, 0.0)

    def measure_distances(self) -> Array:
        """Moves from each state to the nearest won one [L, S]; :data:`FAR` if none is reachable."""
        levels = np.arange(len(self))[:, None, None]
        distance = np.where(self.won, 0, FAR)
        while True:
            nearer = np.minimum(distance, np.minimum(FAR, 1 + distance[levels, self.after].min(2)))
            if (nearer == distance).all():
                return distance
            distance = nearer

    def find_reachable(self, turns: int) -> tuple[Array, Array]:
        """Levels and states [M] in which an episode of ``turns`` may have to act."""
        reached = np.zeros(self.won.shape, dtype=bool)
        reached[np.arange(len(self)), self.start] = True
        edge = reached
        for _ in range(turns - 1):
            levels, states = np.nonzero(edge & ~self.won)
            new = np.zeros_like(reached)
            new[levels[:, None], self.after[levels, states]] = True
            edge = new & ~reached
            reached = reached | new
        levels, states = np.nonzero(reached & ~self.won)
        return levels, states

    def solve(self, levels: Array, states: Array, policy: Array, turns: int) -> Array:
        """Exact probability of winning each level within ``turns`` [L], by dynamic programming.

        Args:
            levels, states: [M] of :meth:`find_reachable`.
            policy: [M, 4] probability of each move there.
            turns: of an episode.
        """
        value = self.won.astype(np.float64)
        following = self.after[levels, states]
        for _ in range(turns):
            chance = (policy * value[levels[:, None], following]).sum(1)
            value = value.copy()
            value[levels, states] = chance
        return value[np.arange(len(self)), self.start]
