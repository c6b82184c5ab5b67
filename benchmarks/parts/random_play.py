"""Baseline of every policy: how often random play wins a level."""

from __future__ import annotations

from collections import defaultdict

from spear_envs.sokoban.levels import WALL, Level


def measure_random_play(level: Level, turns: int = 15) -> float:
    """Exact probability that uniformly random play of up, down, left and right wins within ``turns`` moves.

    The distribution over positions is carried forward move by move; nothing is sampled.
    """
    width = level.width
    codes = level.codes
    goal = frozenset(level.targets)
    weights: dict[tuple[int, frozenset[int]], float] = {(level.player, frozenset(level.boxes)): 1.0}
    won = 0.0
    for _ in range(turns):
        following: defaultdict[tuple[int, frozenset[int]], float] = defaultdict(float)
        for (player, boxes), weight in weights.items():
            for step in (-width, width, -1, 1):
                to = player + step
                state = (player, boxes)
                if to in boxes:
                    behind = to + step
                    if codes[behind] != WALL and behind not in boxes:
                        state = (to, boxes - {to} | {behind})
                elif codes[to] != WALL:
                    state = (to, boxes)
                if state[1] == goal:
                    won += weight / 4
                else:
                    following[state] += weight / 4
        weights = following
    return won
