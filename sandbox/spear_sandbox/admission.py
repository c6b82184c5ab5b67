"""Who may run now: places for so many, a bounded queue for the rest, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Admission", "NoPlaceError"]


class NoPlaceError(Exception):
    """A caller has waited as long as it may; the message says for what."""


class Admission:
    """Places for runs, given in order of arrival. Belongs to one event loop.

    Args:
        places: runs at a time.
        longest_queue: callers that may wait; more of them are turned away, but only after the wait they were promised,
            since a caller that is turned away at once comes back at once.
    """

    def __init__(self, places: int, longest_queue: int) -> None:
        self.places = places
        self.longest_queue = longest_queue
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        """Callers that wait for a place."""
        return len(self._waiting)

    async def enter(self, seconds: float | None) -> None:
        """Take a place; give it back with :meth:`leave`.

        Args:
            seconds: how long to wait for it; None for as long as it takes.

        Raises:
            NoPlaceError: none became free within this time.
        """
        if self.taken < self.places and not self._waiting:
            self.taken += 1
            return
        if len(self._waiting) >= self.longest_queue:
            await asyncio.sleep(seconds or 0)
            raise NoPlaceError(f"{self.longest_queue} others wait already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait((turn,), timeout=seconds)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        if not turn.done():
            self._give_up(turn)
            raise NoPlaceError(f"no place became free within {seconds:g} s")

    def leave(self) -> None:
        """Give a place back: to the one who has waited longest, if anybody waits."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.taken -= 1

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # the place came in the same moment: it is the next one's
            self.leave()
        else:
            self._waiting.remove(turn)
