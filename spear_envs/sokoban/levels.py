"""Sokoban levels as text: parsing, checking, content digests and the split by content.

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
"""The ground under each code: floor, or the target under a box or player that is on it."""
WORDS = ("up", "down", "left", "right")
LARGEST_SIDE = 64
_XSB = str.maketrans(" -@+$*.pPbB", "__PSX\u221aOPSX\u221a")


class LevelError(SpearError):
    """A level that cannot be played, or bounds that allow none; the message names the mend."""


class SplitBy(str, Enum):
    """The part of a level that decides its split."""

    LEVEL = "level"
    """The whole board: a held-out level is new, but training probably had its room with other boxes."""
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
        """Return the cell of the player."""
        return next(i for i, code in enumerate(self.codes) if code >= PLAYER)

    @property
    def boxes(self) -> tuple[int, ...]:
        """Return the cells of the boxes, ascending."""
        return tuple(i for i, code in enumerate(self.codes) if code in (BOX, BOX_ON_TARGET))

    @property
    def targets(self) -> tuple[int, ...]:
        """Return the cells of the targets, ascending."""
        return tuple(i for i, code in enumerate(self.codes) if BELOW[code] == TARGET)

    @property
    def solved(self) -> bool:
        """Return whether every box is on a target."""
        return BOX not in self.codes


def parse_level(text: str) -> Level:
    """Read a level from its rows joined by newlines.

    Raises:
        LevelError: for an unknown symbol, ragged rows, a side outside 3 to 64, an open border, not exactly one
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
        raise LevelError("the level lacks a box: place at least one X and a target O for it")
    if len(level.boxes) != len(level.targets):
        raise LevelError(
            f"the level has {len(level.boxes)} boxes and {len(level.targets)} targets: make the numbers equal"
        )
    return level


def read_xsb(text: str) -> str:
    """Write a board in XSB (``@`` player, ``$`` box, ``.`` target, ``+`` and ``*`` on a target) in our symbols.

    Rows may end anywhere, and what the player cannot reach, even through boxes, becomes wall if it is floor.

    Raises:
        LevelError: the player can leave the board.
    """
    rows = text.translate(_XSB).split("\n")
    width = max(map(len, rows))
    if max(len(rows), width) > LARGEST_SIDE:  # before rows of all lengths are filled up
        raise LevelError(f"the level is {len(rows)}x{width}: both sides must be between 3 and {LARGEST_SIDE} cells")
    cells = list("\n".join(row.ljust(width, "_") for row in rows))
    waiting = [place for place, cell in enumerate(cells) if cell in "PS"]
    reached = set(waiting)
    while waiting:
        place = waiting.pop()
        for beside in (place - width - 1, place + width + 1, place - 1, place + 1):
            if not 0 <= beside < len(cells) or cells[beside] == "\n":
                raise LevelError("the player can leave the level: close its outer wall")
            if beside not in reached and cells[beside] != "#":
                reached.add(beside)
                waiting.append(beside)
    return "".join("#" if cell == "_" and place not in reached else cell for place, cell in enumerate(cells))


def format_codes(codes: Sequence[int], width: int) -> str:
    """Return rows of symbols joined by newlines, from cells row by row."""
    flat = "".join([SYMBOLS[code] for code in codes])
    return "\n".join([flat[i : i + width] for i in range(0, len(flat), width)])


def format_spaced(text: str) -> str:
    """Return the spaced form of a board: each cell as blank, symbol, blank, tab (as language-model agents on
    gym-sokoban write it)."""
    return "\n".join("".join(f" {symbol} \t" for symbol in row) for row in text.split("\n"))


def compact_spaced(text: str) -> str:
    """Undo :func:`format_spaced`; return a plain board unchanged."""
    return text.replace(" ", "").replace("\t", "")


def find_symmetries(text: str) -> list[str]:
    """Return the eight rotations and reflections of a board, as texts."""
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
    """Replace the player by its region: cells that it reaches without a push become ``p`` and ``o``.

    Another place within the region is the same puzzle with a few more steps.
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
    """Remove the outer rows and columns that are only wall."""
    rows = [row for row in text.split("\n") if row.strip("#")]
    left = min(len(row) - len(row.lstrip("#")) for row in rows)
    right = max(len(row.rstrip("#")) for row in rows)
    return "\n".join(row[left:right] for row in rows)


def digest_level(text: str) -> str:
    """Return the SHA-256 (hex) of a level up to rotation, reflection, shift within its frame and place in a region."""
    return _digest_board(mark_region(text))


def _digest_board(text: str) -> str:
    return hashlib.sha256(min(find_symmetries(trim_walls(text))).encode()).hexdigest()


_ROOM_ONLY = str.maketrans("\u221aXPS", "O__O")


def digest_room(text: str) -> str:
    """Return the same as :func:`digest_level` for walls and targets alone."""
    return _digest_board(text.translate(_ROOM_ONLY))


def find_split(text: str, split_by: SplitBy = SplitBy.ROOM) -> str:
    """Return ``test``, ``valid`` or ``train`` by content alone, so that no seed can put a level in two splits.

    The first 32 bits of the digest, as a fraction of 2^32: below 0.1 test, below 0.2 valid, otherwise train.
    """
    digest = digest_room(text) if split_by is SplitBy.ROOM else digest_level(text)
    share = int(digest[:8], 16)
    if share < 0.1 * 2**32:
        return "test"
    return "valid" if share < 0.2 * 2**32 else "train"


def find_band(optimal: int | None) -> str:
    """Return the subtask of an optimal number of moves: ``len1-3``, ``len4-6``, ``len7-9``, ``len10+`` or, if it is
    unknown, ``unsolved``."""
    if optimal is None:
        return "unsolved"
    for last in (3, 6, 9):
        if optimal <= last:
            return f"len{last - 2}-{last}"
    return "len10+"
