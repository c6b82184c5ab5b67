"""What an executor needs of a level of isolation."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from signal import Signals
from typing import Protocol

from spear_sandbox.cgroups import Groups
from spear_sandbox.protocol import Health, Isolation
from spear_sandbox.runs import Fork


class Backend(Protocol):
    """One way to start runs in isolation. Belongs to one event loop."""

    level: Isolation
    ending: Signals
    """What ends a run, sent to the process that ``Fork`` gives."""
    groups: Groups | None
    """Control groups for its runs; None where this process may not make any."""

    async def start(self) -> None:
        """Get ready. Raises RefusedError if this machine does not allow it."""

    def borrow(self, code: str) -> AbstractAsyncContextManager[Fork]:
        """Lend what starts the run of this program, until the run has ended."""

    def health(self) -> Health:
        """How it is now."""

    async def close(self) -> None:
        """End all runs and processes."""
