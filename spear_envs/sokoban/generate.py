"""Level generator: random rooms, and start positions chosen by exact solution length."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from spear_envs.sokoban.levels import (
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    PLAYER_ON_TARGET,
    TARGET,
    WALL,
    WORDS,
    Level,
    LevelError,
    SplitBy,
    digest_level,
    find_split,
    format_codes,
)

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


_STROKES = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
    ((0, 0), (0, -1), (1, 0), (1, -1)),
    ((0, 0), (-1, 0), (0, 1)),
)
"""Cells that one stroke of the brush clears around the walker, as (dy, dx)."""
_HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))


@dataclass(frozen=True)
class Recipe:
    """The kind of level to make.

    ``height`` and ``width`` include the border and lie between 5 and 10, ``boxes`` between 1 and 4; the shortest
    solution of every level has between ``shortest`` and ``longest`` moves.
    """

    height: int = 6
    width: int = 6
    boxes: int = 1
    shortest: int = 3
    longest: int = 12
    split_by: SplitBy = SplitBy.ROOM

    def __post_init__(self) -> None:
        if not (5 <= self.height <= 10 and 5 <= self.width <= 10):
            raise LevelError(f"room {self.height}x{self.width}: choose both sides between 5 and 10")
        if not 1 <= self.boxes <= 4:
            raise LevelError(f"boxes={self.boxes}: choose between 1 and 4")
        if not 1 <= self.shortest <= self.longest:
            raise LevelError(f"shortest={self.shortest}, longest={self.longest}: choose 1 <= shortest <= longest moves")

    @property
    def name(self) -> str:
        """Return a stable unique name: ``6x6-1``, with ``-1to15`` and ``-level`` where not the default."""
        bounds = "" if (self.shortest, self.longest) == (3, 12) else f"-{self.shortest}to{self.longest}"
        return f"{self.height}x{self.width}-{self.boxes}{bounds}{'-level' if self.split_by is SplitBy.LEVEL else ''}"


def parse_room(room: str) -> tuple[int, int]:
    """Read ``"6x7"`` as (height 6, width 7).

    Raises:
        LevelError: the text has another form.
    """
    found = re.fullmatch(r"([0-9]{1,3})x([0-9]{1,3})", str(room), re.IGNORECASE)
    if found is None:
        raise LevelError(f'room={room!r}: write height and width as in room="6x6"')
    return int(found[1]), int(found[2])


def make_dice(*key: object) -> Callable[[], float]:
    """Make a function that draws from [0, 1), seeded by ``key`` alone: the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return random.Random(int.from_bytes(digest, "big")).random


def draw_room(dice: Callable[[], float], height: int, width: int) -> bytearray:
    """Draw connected floor by a walk with a brush: height*width cells, 1 floor, 0 wall, the border wall.

    The walk has gym-sokoban's length and probability of turning; the strokes are like its own.
    """
    following, strokes = _tabulate_brush(height, width)
    cell = (1 + int(dice() * (height - 2))) * width
    cell += 1 + int(dice() * (width - 2))
    steps = following[int(dice() * 4)]
    floor = 0
    for _ in range(int(1.7 * (height + width))):
        if dice() < 0.35:
            steps = following[int(dice() * 4)]
        cell = steps[cell]
        floor |= strokes[int(dice() * len(_STROKES))][cell]
    return bytearray(floor.to_bytes(height * width, "little"))


@lru_cache(maxsize=64)
def _tabulate_brush(height: int, width: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tabulate for each heading the cell after each cell, and for each stroke what it clears there: a byte a cell."""
    inner = [(y, x) if 0 < y < height - 1 and 0 < x < width - 1 else None for y in range(height) for x in range(width)]

    def follow(place: tuple[int, int] | None, heading: tuple[int, int]) -> int:
        if place is None:
            return 0
        y, x = (min(max(at + d, 1), size - 2) for at, d, size in zip(place, heading, (height, width), strict=True))
        return y * width + x

    def clear(place: tuple[int, int] | None, stroke: Sequence[tuple[int, int]]) -> int:
        if place is None:
            return 0
        cells = {(place[0] + dy) * width + place[1] + dx for dy, dx in stroke}
        return sum(1 << 8 * cell for cell in cells if inner[cell])

    following = [[follow(place, heading) for place in inner] for heading in _HEADINGS]
    return following, [[clear(place, stroke) for place in inner] for stroke in _STROKES]


@lru_cache(maxsize=2**14)
def _find_room_split(grid: bytes, width: int, targets: tuple[int, ...]) -> str:
    """Return the split of a room, of which small ones are drawn again and again."""
    return find_split(_format_state(grid, width, targets, 0))


def make_level(recipe: Recipe, *key: object, split: str | None = None, budget: int = STATE_BUDGET) -> Level:
    """Make the level of ``key`` and the recipe; see :func:`draw_level`."""
    return draw_level(recipe, make_dice("sokoban", recipe.name, *key), () if split is None else (split,), budget)


def draw_level(
    recipe: Recipe, dice: Callable[[], float], splits: tuple[str, ...] = (), budget: int = STATE_BUDGET
) -> Level:
    """Draw one level, with its optimal number of moves.

    A room is drawn and its targets placed; one backward search gives the solution length of all its start positions;
    one of those within the bounds, with no box on a target and the player beside the boxes, is taken at random. Rooms
    without any are drawn again, and so are levels outside ``splits`` where some are given.

    Raises:
        LevelError: when ``budget`` states have been searched without finding a level.
    """
    height, width, boxes = recipe.height, recipe.width, recipe.boxes
    searched = 0
    by_room = bool(splits) and recipe.split_by is SplitBy.ROOM
    while searched < budget:
        grid = draw_room(dice, height, width)
        pool = [cell for cell, floor in enumerate(grid) if floor]
        searched += len(pool)  # so that rooms which are thrown away unsearched end the loop too
        if len(pool) < boxes + 2:
            continue
        targets = [pool.pop(int(dice() * len(pool))) for _ in range(boxes)]
        if by_room and _find_room_split(bytes(grid), width, tuple(targets)) not in splits:
            continue
        layers = measure_backward(grid, width, targets, recipe.longest, budget)
        searched += sum(map(len, layers))
        solved = sum([1 << target for target in targets]) << CELL_BITS
        fits = [[state for state in layer if not state & solved] for layer in layers[recipe.shortest :]]
        choice = sum(map(len, fits))
        if not choice:
            continue
        choice = int(dice() * choice)
        moves = recipe.shortest
        for layer in fits:
            if choice < len(layer):
                break
            choice -= len(layer)
            moves += 1
        state = layer[choice]
        text = _format_state(grid, width, targets, state)
        if not splits or by_room or find_split(text, recipe.split_by) in splits:
            codes = tuple(_place(grid, targets, state))
            return Level(text, height, width, codes, moves)
    raise LevelError(
        f"no {height}x{width} level with {boxes} box(es), {recipe.shortest} to {recipe.longest} moves long, within "
        f"{budget:,} searched states: ask for a smaller shortest, a larger longest, a smaller room or fewer boxes"
    )


def _place(grid: Sequence[int], targets: Sequence[int], state: int) -> list[int]:
    codes = [FLOOR if floor else WALL for floor in grid]
    for target in targets:
        codes[target] = TARGET
    player, boxes = state & CELL_MASK, state >> CELL_BITS
    while boxes:
        low = boxes & -boxes
        boxes ^= low
        cell = low.bit_length() - 1
        codes[cell] = BOX_ON_TARGET if codes[cell] == TARGET else BOX
    if player:  # cell 0 is a corner of the border: no player
        codes[player] = PLAYER_ON_TARGET if codes[player] == TARGET else PLAYER
    return codes


def _format_state(grid: Sequence[int], width: int, targets: Sequence[int], state: int) -> str:
    return format_codes(_place(grid, targets, state), width)


def draw_held_out(recipe: Recipe, count: int) -> dict[str, list[Level]]:
    """Draw the held-out lists ``{"valid": [...], "test": [...]}`` of ``count`` levels with distinct digests each.

    Levels are drawn one after another as for training, and the content decides the list of each. Small rooms have
    fewer different levels: after 5,000 draws in a row without a new one the lists stay shorter.

    Raises:
        LevelError: a list stays empty, or a single level exceeds the budget of states.
    """
    lists: dict[str, list[Level]] = {"valid": [], "test": []}
    seen: set[str] = set()
    dice = make_dice("sokoban", recipe.name, "held-out")
    idle = 0
    while idle < 5_000 and any(len(levels) < count for levels in lists.values()):
        level = draw_level(recipe, dice, tuple(lists))
        idle += 1
        wanted = lists[find_split(level.text, recipe.split_by)]
        if len(wanted) == count:
            continue
        digest = digest_level(level.text)
        if digest not in seen:
            wanted.append(level)
            seen.add(digest)
            idle = 0
    if not all(lists.values()):
        raise LevelError(
            f"{recipe.name} has too few rooms for held-out levels: widen the bounds on the moves, take a larger"
            " room, or split_by='level'"
        )
    return lists
