"""Exact searches over Sokoban positions: backward from the solved ones, forward to the shortest solution.

A state is one integer: the set of boxes as a bit mask above the cell of the player (the lowest ``CELL_BITS`` bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from spear_envs.sokoban.levels import WALL, WORDS, Level, LevelError

CELL_BITS = 12
CELL_MASK = (1 << CELL_BITS) - 1
STATE_BUDGET = 2_000_000


def measure_backward(
    grid: Sequence[int], width: int, targets: Sequence[int], longest: int, budget: int = STATE_BUDGET
) -> list[list[int]]:
    """Find all states at most ``longest`` moves from the solved position, by optimal number of moves.

    One backward breadth-first search undoes walks and pushes, from every position with the boxes on ``targets``.
    ``grid`` has non-zero for floor, cell by cell, with a wall border.

    Returns:
        ``layers[n]``: the states (see the module) whose shortest solution has exactly n moves.

    Raises:
        LevelError: more than ``budget`` states were found.
    """
    steps = _tabulate_steps(len(grid), width)
    near = [[step for step in steps[cell] if grid[step[0]]] if floor else () for cell, floor in enumerate(grid)]
    solved = sum([1 << target for target in targets])
    layer = [solved << CELL_BITS | cell for cell, floor in enumerate(grid) if floor and not solved >> cell & 1]
    seen = set(layer)
    layers = [layer]
    while layer and len(layers) <= longest:
        following = []
        for state in layer:
            boxes = state >> CELL_BITS
            for before, before_bit, ahead_bit, here_bit in near[state & CELL_MASK]:
                if boxes & before_bit:
                    continue
                earlier = boxes << CELL_BITS | before  # the player walked here
                if earlier not in seen:
                    seen.add(earlier)
                    following.append(earlier)
                if boxes & ahead_bit:  # or came here pushing the box that is now ahead
                    earlier = (boxes ^ ahead_bit ^ here_bit) << CELL_BITS | before
                    if earlier not in seen:
                        seen.add(earlier)
                        following.append(earlier)
        if len(seen) > budget:
            raise LevelError(
                f"the search for levels passed its budget of {budget:,} states: "
                "ask for a smaller room, fewer boxes or a smaller longest"
            )
        layers.append(following)
        layer = following
    return layers


@lru_cache(maxsize=64)
def _tabulate_steps(area: int, width: int) -> list[list[tuple[int, int, int, int]]]:
    """Tabulate for every inner cell the cells that the player may come from: (cell, its bit, bit of the cell opposite,
    bit of the inner cell)."""
    return [
        [(cell + d, 1 << cell + d, 1 << cell - d, 1 << cell) for d in (-width, width, -1, 1)]
        if width <= cell < area - width and 0 < cell % width < width - 1
        else []
        for cell in range(area)
    ]


def measure_pushes(codes: Sequence[int], width: int, targets: Sequence[int]) -> dict[int, int]:
    """Return the least pushes that bring a lone box from each cell to a target; cells without a way are left out."""
    distance = dict.fromkeys(targets, 0)
    layer = list(targets)
    while layer:
        following = []
        for cell in layer:
            for delta in (-width, width, -1, 1):
                earlier, stand = cell - delta, cell - 2 * delta
                if codes[earlier] != WALL and earlier not in distance and codes[stand] != WALL:
                    distance[earlier] = distance[cell] + 1
                    following.append(earlier)
        layer = following
    return distance


def find_solution(level: Level, budget: int = STATE_BUDGET) -> list[str] | None:
    """Find a shortest list of words (up, down, left, right) that solves ``level``; None if the position is lost.

    Best-first search (A*) whose estimate, the sum of the boxes' lone push distances, never exceeds the moves left and
    falls by at most one a move; so the first solution found is optimal. A solved level gives ``[]``.

    Raises:
        LevelError: more than ``budget`` states were seen without an answer.
    """
    width = level.width
    pushes = measure_pushes(level.codes, width, level.targets)
    if any(box not in pushes for box in level.boxes):
        return None
    steps = {
        cell: [(cell + d, 1 << cell + d, cell + 2 * d, 1 << max(0, cell + 2 * d)) for d in (-width, width, -1, 1)
               if level.codes[cell + d] != WALL]
        for cell, code in enumerate(level.codes) if code != WALL
    }  # fmt: skip
    goal = sum([1 << target for target in level.targets])
    start = sum([1 << box for box in level.boxes]) << CELL_BITS | level.player
    parents = {start: -1}
    moves = {start: 0}  # the complement of the number once a state has been expanded
    waiting = [[start]]  # by moves plus estimate, less those of the start
    total = 0
    while total < len(waiting):
        if not waiting[total]:
            total += 1
            continue
        state = waiting[total].pop()
        boxes = state >> CELL_BITS
        if boxes == goal:
            return _read_words(parents, state, width)
        count = moves[state]
        if count < 0:
            continue
        moves[state] = ~count
        for to, to_bit, behind, behind_bit in steps[state & CELL_MASK]:
            after, rise = boxes, 1
            if boxes & to_bit:
                if behind not in pushes or boxes & behind_bit:  # wall, box, or a cell that a box cannot leave
                    continue
                after = boxes ^ to_bit ^ behind_bit
                rise += pushes[behind] - pushes[to]
            reached = after << CELL_BITS | to
            known = moves.get(reached)
            if known is not None and known <= count + 1:  # expanded ones are negative
                continue
            moves[reached] = count + 1
            parents[reached] = state
            while total + rise >= len(waiting):
                waiting.append([])
            waiting[total + rise].append(reached)
        if len(moves) > budget:
            raise LevelError(
                f"the search for a solution passed its budget of {budget:,} states: give a smaller level or fewer boxes"
            )
    return None


def _read_words(parents: dict[int, int], state: int, width: int) -> list[str]:
    words = []
    while (before := parents[state]) >= 0:
        delta = (state & CELL_MASK) - (before & CELL_MASK)
        words.append(WORDS[(-width, width, -1, 1).index(delta)])
        state = before
    return words[::-1]
