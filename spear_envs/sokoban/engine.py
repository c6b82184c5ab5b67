"""One board, in plain Python lists: gym-sokoban's dynamics, native reward and pictures."""

from __future__ import annotations

import numpy as np

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
)
from spear_envs.sokoban.sprites import TILE, Image

STILL, UP, DOWN, LEFT, RIGHT = range(5)
ACTIONS = {"still": STILL, "up": UP, "down": DOWN, "left": LEFT, "right": RIGHT}
MOVE_REWARD = -0.1
WIN_REWARD = 10
_FREE = (FLOOR, TARGET)
_BOXES = (BOX, BOX_ON_TARGET)


class Board:
    """One board, played move by move.

    Args:
        level: the first level.
        tiles: uint8 (7, 16, 16, 3); without them the board has no picture and is a little faster.

    Attributes:
        codes: the cells row by row, as in the level text (6 for a player on a target).
        player: cell of the player.
        on_target: number of boxes on targets.
        moved, pushed: whether the last move moved the player, and whether it pushed a box.
    """

    def __init__(self, level: Level, tiles: Image | None = None) -> None:
        self._tiles = tiles
        self.height = self.width = 0
        self.load(level)

    def load(self, level: Level) -> None:
        """Start another level."""
        if (level.height, level.width) != (self.height, self.width):
            self.height, self.width = level.height, level.width
            self._steps = (0, -self.width, self.width, -1, 1)
            if self._tiles is not None:
                self._make_picture()
        self.codes = list(level.codes)
        self.below = [BELOW[code] for code in level.codes]
        self.player = level.player
        self.boxes = len(level.boxes)
        self.on_target = level.codes.count(BOX_ON_TARGET)
        self.moved = self.pushed = False
        self._letters = list(level.text)
        self._stale = set(range(len(self.codes)))

    def _make_picture(self) -> None:
        self._picture = np.zeros((self.height * TILE, self.width * TILE, 3), np.uint8)
        # A tile's row of 48 bytes is copied as one item.
        rows = self._picture.reshape(self.height, TILE, self.width, TILE * 3).view(f"V{TILE * 3}")[..., 0]
        self._places = [rows[y, :, x] for y in range(self.height) for x in range(self.width)]
        self._stamps = list(np.ascontiguousarray(self._tiles).reshape(7, TILE, TILE * 3).view(f"V{TILE * 3}")[..., 0])

    @property
    def won(self) -> bool:
        """Return whether every box is on a target."""
        return self.on_target == self.boxes

    def step(self, action: int) -> float:
        """Play one move (0 still, 1 up, 2 down, 3 left, 4 right) and return gym-sokoban's reward for it.

        The player walks onto floor or an empty target, and pushes a box if the cell behind it is floor or an empty
        target; otherwise nothing moves. The reward is -0.1, +1 if a box came onto a target and -1 if one left its
        target, +10 if all boxes are on targets, added in this order.
        """
        codes = self.codes
        step = self._steps[action]
        here = self.player
        to = here + step
        ahead = codes[to]
        gain = 0
        self.moved = self.pushed = False
        changes: tuple[tuple[int, int], ...] = ()
        if ahead in _FREE:
            changes = ((here, self.below[here]), (to, PLAYER if ahead == FLOOR else PLAYER_ON_TARGET))
        elif ahead in _BOXES:
            beyond = codes[to + step]
            if beyond in _FREE:
                gain = (beyond == TARGET) - (ahead == BOX_ON_TARGET)
                self.on_target += gain
                self.pushed = True
                changes = (
                    (here, self.below[here]),
                    (to, PLAYER if ahead == BOX else PLAYER_ON_TARGET),
                    (to + step, BOX if beyond == FLOOR else BOX_ON_TARGET),
                )
        if changes:
            self.player = to
            self.moved = True
            width, letters, stale = self.width, self._letters, self._stale
            for cell, code in changes:
                codes[cell] = code
                letters[cell + cell // width] = SYMBOLS[code]
                stale.add(cell)
        reward = MOVE_REWARD + gain
        return reward + WIN_REWARD if self.on_target == self.boxes else reward

    def text(self) -> str:
        """Return the board, rows joined by newlines."""
        return "".join(self._letters)

    def frame(self) -> Image:
        """Return the picture, uint8 (16*height, 16*width, 3), a fresh array; only changed tiles are redrawn.

        Raises:
            RuntimeError: the board was made without tiles.
        """
        if self._tiles is None:
            raise RuntimeError("this board has no tiles: make it with Board(level, tiles)")
        codes, places, stamps = self.codes, self._places, self._stamps
        for cell in self._stale:
            places[cell][...] = stamps[codes[cell]]
        self._stale.clear()
        return self._picture.copy()
