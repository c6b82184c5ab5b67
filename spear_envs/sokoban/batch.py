"""Many boards of one size, in NumPy: the same dynamics, rewards, texts and pictures as ``engine.Board``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.sokoban.engine import MOVE_REWARD, WIN_REWARD
from spear_envs.sokoban.levels import (
    BELOW,
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    PLAYER_ON_TARGET,
    SYMBOLS,
    TARGET,
    Level,
    format_codes,
)
from spear_envs.sokoban.sprites import TILE, Image

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_BELOW = np.array(BELOW, np.uint8)
_LETTERS = np.array([ord(symbol) for symbol in SYMBOLS], np.uint32)
_IS_FREE = np.array([code in (FLOOR, TARGET) for code in range(7)])
_IS_BOX = np.array([code in (BOX, BOX_ON_TARGET) for code in range(7)])


class Batch:
    """N boards that are played together.

    Args:
        levels: N levels of one size.
        tiles: uint8 (7, 16, 16, 3), or None for boards without pictures.

    Attributes:
        codes: uint8 (N, cells), as in the level texts.
        player: int64 (N,), cells of the players.
        boxes, on_target: int64 (N,), boxes and boxes on targets.

    Raises:
        SpearError: when the levels differ in size.
    """

    def __init__(self, levels: Sequence[Level], tiles: Image | None = None) -> None:
        first = levels[0]
        self.count, self.height, self.width = len(levels), first.height, first.width
        self.area = self.height * self.width
        self.codes = np.zeros((self.count, self.area), np.uint8)
        self.below = np.zeros((self.count, self.area), np.uint8)
        self.player = np.zeros(self.count, np.int64)
        self.boxes = np.zeros(self.count, np.int64)
        self.on_target = np.zeros(self.count, np.int64)
        self._codes, self._below = self.codes.reshape(-1), self.below.reshape(-1)
        self._base = np.arange(self.count, dtype=np.int64) * self.area
        self._steps = np.array([0, -self.width, self.width, -1, 1], np.int64)
        length = self.height * (self.width + 1) - 1
        self._letters = np.full((self.count, length), ord("\n"), np.uint32)
        cells = np.arange(self.area)
        self._letter_of = cells + cells // self.width  # place of a cell in the text
        self._tiles: npt.NDArray[np.void] | None = None
        if tiles is not None:
            # A tile's row of 48 bytes is copied as one item.
            self._tiles = np.ascontiguousarray(tiles).reshape(7, TILE, TILE * 3).view(f"V{TILE * 3}")[..., 0]
            self._picture = np.zeros((self.count, self.height, TILE, self.width, TILE * 3), np.uint8)
            self._rows = self._picture.view(f"V{TILE * 3}")[..., 0]
        self.load(np.arange(self.count), levels)

    def load(self, rows: Ints, levels: Sequence[Level]) -> None:
        """Put other levels onto the boards ``rows``.

        Raises:
            SpearError: when a level has another size than the batch.
        """
        if not len(rows):
            return
        for level in levels:
            if (level.height, level.width) != (self.height, self.width):
                raise SpearError(
                    f"a {level.height}x{level.width} level in a batch of {self.height}x{self.width} boards: "
                    "give all boards of a batch the same size"
                )
        codes = np.array([level.codes for level in levels], np.uint8)
        self.codes[rows] = codes
        self.below[rows] = _BELOW[codes]
        self.player[rows] = np.argmax(codes >= PLAYER, axis=1)
        self.boxes[rows] = _IS_BOX[codes].sum(1)
        self.on_target[rows] = (codes == BOX_ON_TARGET).sum(1)
        self._letters[np.asarray(rows)[:, None], self._letter_of] = _LETTERS[codes]
        if self._tiles is not None:
            tiles = self._tiles[codes.reshape(-1, self.height, self.width)]
            self._rows[rows] = tiles.transpose(0, 1, 3, 2)

    def step(self, actions: Ints, rows: Ints | None = None) -> tuple[npt.NDArray[np.float64], Bools, Bools]:
        """Play one move on every board, or on the boards ``rows`` alone.

        Args:
            actions: int (K,), 0 still, 1 up, 2 down, 3 left, 4 right.
            rows: int (K,) distinct boards; all of them by default.

        Returns:
            Native rewards float64 (K,), whether the player moved (K,), whether a box was pushed (K,).
        """
        codes, below = self._codes, self._below
        base = self._base if rows is None else self._base[rows]
        here = base + (self.player if rows is None else self.player[rows])
        steps = self._steps[actions]
        to = here + steps
        behind = np.where(_IS_BOX[codes[to]], to + steps, to)  # a cell of the same board in any case
        ahead, beyond = codes[to], codes[behind]
        pushed = _IS_BOX[ahead] & _IS_FREE[beyond]
        moved = pushed | _IS_FREE[ahead]
        gain = np.where(pushed, (beyond == TARGET).astype(np.int64) - (ahead == BOX_ON_TARGET), 0)
        far, near, left = behind[pushed], to[moved], here[moved]
        codes[far] = np.where(beyond[pushed] == TARGET, BOX_ON_TARGET, BOX)
        codes[near] = np.where(below[near] == TARGET, PLAYER_ON_TARGET, PLAYER)
        codes[left] = below[left]
        self._redraw(np.concatenate([far, near, left]))
        if rows is None:
            self.player[:] = np.where(moved, to - base, self.player)
            self.on_target += gain
            won = self.on_target == self.boxes
        else:
            self.player[rows] += np.where(moved, steps, 0)
            self.on_target[rows] += gain
            won = self.on_target[rows] == self.boxes[rows]
        rewards = MOVE_REWARD + gain
        rewards[won] += WIN_REWARD
        return rewards, moved, pushed

    def _redraw(self, cells: Ints) -> None:
        board, cell = np.divmod(cells, self.area)
        codes = self._codes[cells]
        self._letters[board, self._letter_of[cell]] = _LETTERS[codes]
        if self._tiles is not None:
            y, x = np.divmod(cell, self.width)
            self._rows[board, y, :, x] = self._tiles[codes]

    @property
    def won(self) -> Bools:
        """Whether every box stands on a target, (N,)."""
        return self.on_target == self.boxes

    def texts(self, rows: Ints | None = None) -> list[str]:
        """The boards (all, or ``rows`` in their order), rows joined by newlines."""
        letters = self._letters if rows is None else self._letters[rows]
        return letters.view(f"U{letters.shape[1]}")[:, 0].tolist()

    def frames(self, copy: bool = True) -> Image:
        """The pictures, uint8 (N, 16*height, 16*width, 3).

        With ``copy=False`` the buffer itself is handed out: the next ``step`` or ``load`` changes it.

        Raises:
            RuntimeError: when the batch was made without tiles.
        """
        if self._tiles is None:
            raise RuntimeError("this batch has no tiles: make it with Batch(levels, tiles)")
        frames = self._picture.reshape(self.count, self.height * TILE, self.width * TILE, 3)
        return frames.copy() if copy else frames

    def read_board(self, row: int) -> str:
        """The text of one board, from its codes."""
        return format_codes(self.codes[row].tolist(), self.width)
