"""The sessions of a service: found by name, bounded in number, and ended when idle."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Protocol

from spear_sandbox.protocol import FaultKind, Limits, SandboxFault
from spear_sandbox.sessions import LocalSession

_NAME = re.compile("[0-9a-f]{32}")
_SWEEPS = 10
"""Checks within the idle time."""


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
    """At most ``most`` open sessions by name, ended ``idle_s`` after their last cell. Belongs to one event loop."""

    def __init__(self, executor: SessionOpener, *, most: int, idle_s: float) -> None:
        self.most = most
        self.idle_s = idle_s
        self._executor = executor
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
            await asyncio.sleep(min(idle for _, idle in self._sessions.values()) / _SWEEPS if self._sessions else 1.0)
            now = time.monotonic()
            for session, idle in list(self._sessions.values()):
                if not session.running and now - session.used > idle:
                    await session.close()
