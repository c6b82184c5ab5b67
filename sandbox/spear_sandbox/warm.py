"""Level ``namespaces``: warm interpreters, kept alive and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from spear_sandbox.cgroups import Groups
from spear_sandbox.guest.zygote import SESSIONS
from spear_sandbox.installation import Installation
from spear_sandbox.protocol import FaultKind, Health, Isolation, SandboxFault
from spear_sandbox.runs import Backend, Fork
from spear_sandbox.zygotes import RefusedError, Zygote, start_zygote

logger = logging.getLogger(__name__)

RUNS_OF_ONE = 1000
"""An interpreter is replaced after this many runs, which bounds the fragmentation of its memory."""
SESSION_MODULES = "numpy"
"""Sessions are forked from the kind of interpreter for programs with this word."""
CANCEL_S = 1.0
ALIVE_S = 5.0
"""How long a run waits for an interpreter if all have died."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 1.0


@dataclass(eq=False)
class _Slot:
    """A place for one warm interpreter."""

    kind: int
    zygote: Zygote | None = None
    worn_out: asyncio.Event = field(default_factory=asyncio.Event)
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its first start has succeeded or failed."""


class WarmBackend(Backend):
    """Forks each run from an interpreter that has imported what the program needs.

    There are several kinds, each of ``zygotes`` interpreters: the fewer packages one has, the cheaper it is to fork, so
    each run gets the smallest with what its program names. ``groups`` are closed with this.
    """

    level = Isolation.NAMESPACES
    ending = signal.SIGKILL

    def __init__(self, installation: Installation, *, zygotes: int = 1, uid: int, groups: Groups | None = None) -> None:
        self.groups = groups
        self._installation = installation
        self._uid = uid
        self._slots = [_Slot(kind) for kind in range(len(installation.kinds)) for _ in range(zygotes)]
        self._keepers: list[asyncio.Task[None]] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._restarts = 0
        self._renewed = asyncio.Event()

    async def start(self) -> None:
        # The smallest kind shows whether it works. Programs that need another kind wait for it.
        first = self._slots[0]
        await self._start_one(first)
        first.tried.set()
        self._keepers = [asyncio.ensure_future(self._keep(slot)) for slot in self._slots]

    @contextlib.asynccontextmanager
    async def borrow(self, code: str) -> AsyncIterator[Fork]:
        kind = self._installation.choose_kind(code)
        await asyncio.gather(*(slot.tried.wait() for slot in self._slots if slot.kind == kind))
        slot = await self._choose(kind)
        zygote = slot.zygote
        assert zygote is not None
        zygote.running += 1
        if zygote.forked >= RUNS_OF_ONE:
            slot.worn_out.set()
        try:
            yield zygote.fork
        finally:
            zygote.running -= 1

    def health(self) -> Health:
        zygotes = [slot.zygote for slot in self._slots if slot.zygote is not None and slot.zygote.alive]
        alive = len(zygotes)
        features = dict.fromkeys(("userns", "pidns", "netns", "seccomp", "disk"), True)
        features |= {"landlock": False, "cgroup": self.groups is not None}
        features["locks"] = all(zygote.keeps_locks for zygote in zygotes)
        features["users"] = all(zygote.parts_users for zygote in zygotes)
        return Health(self.level, features, alive, self._restarts, ok=alive > 0)

    async def close(self) -> None:
        pending: set[asyncio.Task[None]] = {*self._keepers, *self._retiring}
        while pending:
            for task in pending:
                task.cancel()
            # Before Python 3.12 asyncio.wait_for loses a cancellation that comes together with what it waits for.
            _, pending = await asyncio.wait(pending, timeout=CANCEL_S)
        zygotes = [slot.zygote for slot in self._slots if slot.zygote is not None]
        for slot in self._slots:
            slot.zygote = None
        await asyncio.gather(*(zygote.close() for zygote in zygotes))
        if self.groups is not None:
            self.groups.close()

    async def _choose(self, kind: int) -> _Slot:
        until = time.monotonic() + ALIVE_S
        while not (alive := [slot for slot in self._slots if slot.zygote is not None and slot.zygote.alive]):
            self._renewed.clear()
            try:
                await asyncio.wait_for(self._renewed.wait(), until - time.monotonic())
            except asyncio.TimeoutError:
                text = f"no warm interpreter started within {ALIVE_S:g} s; the pool keeps trying"
                raise SandboxFault(FaultKind.UNAVAILABLE, text) from None
        # One of another kind also runs the program, only slower.
        fitting = [slot for slot in alive if slot.kind == kind] or alive
        return min(fitting, key=lambda slot: slot.zygote.running if slot.zygote else 0)

    async def _start_one(self, slot: _Slot) -> None:
        modules = self._installation.kinds[slot.kind].modules
        if slot.kind == self._installation.choose_kind(SESSION_MODULES):
            modules = (*modules, SESSIONS)
        slot.zygote = await start_zygote(self._installation, modules, uid=self._uid)
        slot.worn_out.clear()
        self._renewed.set()

    async def _keep(self, slot: _Slot) -> None:
        """Start an interpreter, and replace it whenever it has died or is worn out."""
        if slot.zygote is None:
            await self._renew(slot)
        while True:
            zygote = slot.zygote
            assert zygote is not None
            worn_out = asyncio.ensure_future(slot.worn_out.wait())
            try:
                await asyncio.wait((zygote.ended, worn_out), return_when=asyncio.FIRST_COMPLETED)
            finally:
                worn_out.cancel()
            if zygote.alive:
                await self._renew(slot)
                retirement = asyncio.ensure_future(_retire(zygote))
                self._retiring.add(retirement)
                retirement.add_done_callback(self._retiring.discard)
            else:
                logger.warning("a warm interpreter has died; starting another")
                slot.zygote = None
                await zygote.close()
                self._restarts += 1
                await self._renew(slot)

    async def _renew(self, slot: _Slot) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._start_one(slot)
            except (SandboxFault, RefusedError, OSError) as error:
                logger.warning("no new interpreter: %s; again in %.1f s", error, delay_s)
            finally:
                slot.tried.set()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


async def _retire(zygote: Zygote) -> None:
    """End an interpreter after its last run."""
    try:
        while zygote.running and zygote.alive:
            await asyncio.sleep(0.1)
    finally:
        await zygote.close()
