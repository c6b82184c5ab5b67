"""Sokoban levels as text: parsing, checking, content digests and the split that follows from the content.

A level is written row by row: ``#`` wall, ``_`` floor, ``O`` target, ``√`` box on target, ``X`` box, ``P`` player,
``S`` player on target; rows are joined by a newline. These are gym-sokoban's codes 0 to 5, with 6 for ``S``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from spear_envs.core.errors import SpearError

SYMBOLS = "#_O\u221aXPS"
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
BELOW = (WALL, FLOOR, TARGET, TARGET, FLOOR, FLOOR, TARGET)
"""What lies under each code: floor under a box or a player, target under one that stands on it."""
WORDS = ("up", "down", "left", "right")
LARGEST_SIDE = 20


class LevelError(SpearError):
    """A level that cannot be played, or bounds for which no level can be made; the message names the mend."""


class SplitBy(str, Enum):
    """What the split of a level is computed from."""

    LEVEL = "level"
    """The whole board: a held-out level is new, its room has most likely been seen with the box elsewhere."""
    ROOM = "room"
    """Walls and targets: no room of a held-out level occurs in training."""


@dataclass(frozen=True)
class Level:
    """A checked level. ``codes`` are the cells row by row; ``optimal`` the least number of moves, if known."""

    text: str
    height: int
    width: int
    codes: tuple[int, ...]
    optimal: int | None = None

    @property
    def player(self) -> int:
        """Cell of the player."""
        return next(i for i, code in enumerate(self.codes) if code >= PLAYER)

    @property
    def boxes(self) -> tuple[int, ...]:
        """Cells of the boxes, ascending."""
        return tuple(i for i, code in enumerate(self.codes) if code in (BOX, BOX_ON_TARGET))

    @property
    def targets(self) -> tuple[int, ...]:
        """Cells of the targets, ascending."""
        return tuple(i for i, code in enumerate(self.codes) if BELOW[code] == TARGET)

    @property
    def solved(self) -> bool:
        """Whether every box stands on a target."""
        return BOX not in self.codes


def parse_level(text: str) -> Level:
    """Read a level from its rows joined by newlines.

    Raises:
        LevelError: for an unknown symbol, ragged rows, a side outside 3 to 20, an open border, not exactly one
            player, no box, or not as many targets as boxes.
    """
    rows = text.split("\n")
    height, width = len(rows), len(rows[0])
    if any(len(row) != width for row in rows):
        raise LevelError(
            f"the rows of the level have {sorted({len(row) for row in rows})} cells: give every row the same length"
        )
    if not (3 <= height <= LARGEST_SIDE and 3 <= width <= LARGEST_SIDE):
        raise LevelError(f"the level is {height}x{width}: both sides must be between 3 and {LARGEST_SIDE} cells")
    flat = "".join(rows)
    strange = sorted(set(flat) - set(SYMBOLS))
    if strange:
        raise LevelError(
            f"the level contains {strange[0]!a}: write it with # wall, _ floor, O target, X box, "
            "\u221a box on target, P player, S player on target"
        )
    codes = tuple(map(SYMBOLS.index, flat))
    border = (*codes[:width], *codes[-width:], *codes[::width], *codes[width - 1 :: width])
    if any(code != WALL for code in border):
        raise LevelError("the border of the level is open: close the first and last row and column with #")
    level = Level(text, height, width, codes)
    players = sum(code >= PLAYER for code in codes)
    if players != 1:
        raise LevelError(f"the level has {players} players: place exactly one P (or S on a target)")
    if not level.boxes:
        raise LevelError("the level has no box: place at least one X and a target O for it")
    if len(level.boxes) != len(level.targets):
        raise LevelError(
            f"the level has {len(level.boxes)} boxes and {len(level.targets)} targets: make the numbers equal"
        )
    return level


def format_codes(codes: Sequence[int], width: int) -> str:
    """Rows of symbols joined by newlines, from cells row by row."""
    flat = "".join([SYMBOLS[code] for code in codes])
    return "\n".join([flat[i : i + width] for i in range(0, len(flat), width)])


def format_spaced(text: str) -> str:
    """The spaced form of a board: each cell as blank, symbol, blank, tab (as the language-model agents on
    gym-sokoban write it)."""
    return "\n".join("".join(f" {symbol} \t" for symbol in row) for row in text.split("\n"))


def compact_spaced(text: str) -> str:
    """Inverse of :func:`format_spaced`; a plain board is returned unchanged."""
    return text.replace(" ", "").replace("\t", "")


def find_symmetries(text: str) -> list[str]:
    """The eight rotations and reflections of a board, as texts."""
    rows = text.split("\n")
    columns = ["".join(column) for column in zip(*rows, strict=True)]
    forms = []
    for side in (rows, columns):
        mirrored = [row[::-1] for row in side]
        forms += ["\n".join(side), "\n".join(side[::-1]), "\n".join(mirrored), "\n".join(mirrored[::-1])]
    return forms


_FREE = "_OPS"
_REACHED = str.maketrans("_OPS", "popo")


def mark_region(text: str) -> str:
    """The board with the player's region in the player's place: cells to walk to without a push are ``p`` and ``o``.

    Where the player stands within its region makes no other puzzle, only some more steps.
    """
    width = text.index("\n") + 1
    cells = list(text)
    open_cells = [next(place for place, cell in enumerate(cells) if cell in "PS")]
    while open_cells:
        place = open_cells.pop()
        if cells[place] in _FREE:
            cells[place] = cells[place].translate(_REACHED)
            open_cells += (place - width, place + width, place - 1, place + 1)
    return "".join(cells)


def trim_walls(text: str) -> str:
    """The board without the rows and columns at its sides that are nothing but wall."""
    rows = [row for row in text.split("\n") if row.strip("#")]
    left = min(len(row) - len(row.lstrip("#")) for row in rows)
    right = max(len(row.rstrip("#")) for row in rows)
    return "\n".join(row[left:right] for row in rows)


def digest_level(text: str) -> str:
    """sha256 (hex) of a level up to rotation and reflection, shift within its frame, and place within a region."""
    return _digest_board(mark_region(text))


def _digest_board(text: str) -> str:
    return hashlib.sha256(min(find_symmetries(trim_walls(text))).encode()).hexdigest()


_ROOM_ONLY = str.maketrans("\u221aXPS", "O__O")


def digest_room(text: str) -> str:
    """Like :func:`digest_level`, of walls and targets alone."""
    return _digest_board(text.translate(_ROOM_ONLY))


def find_split(text: str, split_by: SplitBy = SplitBy.ROOM) -> str:
    """``test``, ``valid`` or ``train``, from the content alone, so that no seed can put one level in two splits.

    The first 32 bits of the digest, as a fraction of 2^32: below 0.1 test, below 0.2 valid, otherwise train.
    """
    digest = digest_room(text) if split_by is SplitBy.ROOM else digest_level(text)
    share = int(digest[:8], 16)
    if share < 0.1 * 2**32:
        return "test"
    return "valid" if share < 0.2 * 2**32 else "train"


def find_band(optimal: int) -> str:
    """Subtask name of a level by its optimal number of moves: ``len1-3``, ``len4-6``, ``len7-9`` or ``len10+``."""
    for last in (3, 6, 9):
        if optimal <= last:
            return f"len{last - 2}-{last}"
    return "len10+"
