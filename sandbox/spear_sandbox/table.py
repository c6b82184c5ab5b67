"""The sessions of a service: found by name, bounded in number, and ended when idle."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from spear_sandbox.cgroups import measure_pressure
from spear_sandbox.protocol import FaultKind, Limits, SandboxFault
from spear_sandbox.sessions import LocalSession

_NAME = re.compile("[0-9a-f]{32}")
_SWEEP_S = 1.0
FULL = 0.85
"""Share of the container's memory above which the session that has been idle longest ends: what the kernel would
kill else may be a run, or the service."""


class SessionOpener(Protocol):
    """Opens sessions."""

    async def open_session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> LocalSession:
        """See :meth:`spear_sandbox.local.LocalExecutor.open_session`."""
        ...


class TooManySessionsError(Exception):
    """The limit of open sessions is reached."""


class SessionTable:
    """Open sessions by name. Belongs to one event loop.

    Args:
        executor: opens them.
        most: how many may be open.
        idle_s: seconds after its last cell at which a session ends.
        pressure: measures which share of the memory is held; above :data:`FULL` the longest idle session ends.
    """

    def __init__(
        self,
        executor: SessionOpener,
        *,
        most: int,
        idle_s: float,
        pressure: Callable[[], float] = measure_pressure,
    ) -> None:
        self.most = most
        self.idle_s = idle_s
        self._executor = executor
        self._pressure = pressure
        self._sessions: dict[str, tuple[LocalSession, float]] = {}
        self._opening = 0
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(
        self, files: Mapping[str, bytes], limits: Limits, idle_s: float | None = None
    ) -> tuple[LocalSession, float]:
        """Open a session; return it and the idle seconds after which it ends, at most what this table allows.

        Raises TooManySessionsError at the limit, or as :meth:`spear_sandbox.local.LocalExecutor.open_session`.
        """
        if len(self._sessions) + self._opening >= self.most:
            raise TooManySessionsError(f"all {self.most} sessions are open: close one, or wait until an idle one ends.")
        self._opening += 1
        try:
            session = await self._executor.open_session(files=files, limits=limits)
        finally:
            self._opening -= 1
        idle = min(idle_s or self.idle_s, self.idle_s)
        self._sessions[session.id] = session, idle
        session.on_end = lambda: self._sessions.pop(session.id, None) and None
        if not session.alive:
            self._sessions.pop(session.id)
        if self._sweeper is None:
            self._sweeper = asyncio.ensure_future(self._sweep())
        return session, idle

    def find(self, name: str) -> LocalSession:
        """Find the session of this name. Raises SandboxFault if it has ended, LookupError if none can have it."""
        if name in self._sessions:
            return self._sessions[name][0]
        if _NAME.fullmatch(name) is None:
            raise LookupError(name)
        text = "this session has ended, or the server was restarted: open another."
        raise SandboxFault(FaultKind.SESSION_ENDED, text)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min([_SWEEP_S, *(idle / 10 for _, idle in self._sessions.values())]))
            now = time.monotonic()
            pressed = self._pressure() > FULL
            for session, idle in sorted(self._sessions.values(), key=lambda one: one[0].used):
                if not session.running and (pressed or now - session.used > idle):
                    await session.close()
                    pressed = self._pressure() > FULL
