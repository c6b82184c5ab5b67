"""Limits of the service, and the admission of runs: a fixed number of places, and a bounded first-come queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field

from spear_sandbox.options import option
from spear_sandbox.protocol import Limits

REMEMBERED = 64
"""Runs whose ends say how fast the queue moves."""
FEWEST = 16
"""Nobody is turned away for the queue's speed until this many runs have ended since it was last empty."""
SLACK = 1.25
"""Safety factor on the measured time per run."""


@dataclass(frozen=True)
class ServiceSettings:
    """Everything but the executor."""

    max_running: int
    """Runs at a time."""
    queue_length: int = option(4096, "Requests that may wait for a place.", at_least=0)
    queue_wait_s: float = option(
        30.0,
        "Seconds that a request may wait for a place, then 504; 503 at once if they will not suffice.",
        flag="queue-wait",
        at_least=0,
    )
    """``compile_timeout`` + 5 s, if that is less."""
    busy_status: int = option(
        503,
        "Status of a run that is turned away at once. verl's own client retries after 504, not after 503.",
        choices=(503, 504),
    )
    max_run_s: float = option(
        300.0,
        "Seconds to which longer timeouts of requests are cut.",
        flag="max-run-timeout",
        above=0,
        at_most=86_400,
    )
    limits: Limits = field(default_factory=Limits)
    """Limits of each run; a request may lower the memory."""
    body_bytes: int = option(
        16 << 20, "MiB of a request; larger ones get 413.", flag="max-body-mb", at_least=1, unit=1 << 20
    )
    token: str | None = field(default=None, repr=False)
    """Bearer token that all paths but ``/v1/ping`` and ``/health`` require; None for no token."""
    max_sessions: int = option(256, "Sessions that may be open; idle ones take memory, but no place.", at_least=0)
    session_idle_s: float = option(
        600.0, "Seconds after which a session that nobody uses is ended.", flag="session-idle", at_least=1
    )
    local: bool = False
    """Listens on the loopback interface: requests under the name of another host are refused."""
    hosts: frozenset[str] = frozenset()
    """Host names accepted without a token, besides addresses and names without a dot."""


class NoPlaceError(Exception):
    """A caller has waited as long as it may."""


class QueueFullError(NoPlaceError):
    """No place would become free within a caller's time, so it is turned away; it may come again after ``retry_s``."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Admission:
    """Places for runs, given in order of arrival. Belongs to one event loop.

    Callers beyond ``longest_queue`` are turned away at once, as are those whose turn, at the speed of the queue, would
    come too late.
    """

    def __init__(self, places: int, longest_queue: int) -> None:
        self.places = places
        self.longest_queue = longest_queue
        self.taken = 0
        self._waiting: deque[_Turn] = deque()
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def queued(self) -> int:
        """Callers that wait for a place."""
        return len(self._waiting)

    async def enter(self, seconds: float | None) -> None:
        """Take a place within these seconds (None for as long as it takes); give it back with :meth:`leave`.

        Raises QueueFullError if none will become free in time, NoPlaceError if none did.
        """
        if self.taken < self.places and not self._waiting:
            self.taken += 1
            return
        turn = _Turn(math.inf if seconds is None else time.monotonic() + seconds)
        if len(self._waiting) >= self.longest_queue:
            raise QueueFullError(f"{self.longest_queue} others wait already", self._expect(self.longest_queue))
        self._waiting.append(turn)
        self._turn_away()
        try:
            await asyncio.wait((turn.come,), timeout=seconds)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        if not turn.come.done():
            self._give_up(turn)
            raise NoPlaceError(f"no place became free within {seconds:g} s")
        turn.come.result()

    def leave(self) -> None:
        """Give a place back, to the caller that has waited longest if there is one."""
        if self._waiting:
            self._ends.append(time.monotonic())
            self._waiting.popleft().come.set_result(None)
            self._turn_away()
        else:
            self._ends.clear()
            self.taken -= 1

    def _turn_away(self) -> None:
        """Turn away callers at the end of the queue whose turn would come too late."""
        if len(self._ends) < FEWEST:
            return
        now = time.monotonic()
        while self._waiting and now + self._expect(len(self._waiting)) > self._waiting[-1].until:
            wait_s = self._expect(len(self._waiting))
            others = len(self._waiting) - 1
            self._waiting.pop().come.set_exception(
                QueueFullError(f"{others} others wait already, for some {wait_s:.0f} s", wait_s)
            )

    def _expect(self, number: int) -> float:
        """Return the seconds until the turn of the caller with this number in the queue, from 1."""
        if len(self._ends) < FEWEST:
            return 1.0
        return SLACK * number * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def _give_up(self, turn: _Turn) -> None:
        if not turn.come.done():
            self._waiting.remove(turn)
        elif turn.come.exception() is None:  # the place came at the same moment: pass it on
            self.leave()


class _Turn:
    """A waiting caller."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
