"""Runs in sandboxes of this machine: a private pool for one event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence

from spear_sandbox.guest.job import Job
from spear_sandbox.installation import Installation, find_installation
from spear_sandbox.pool.admission import Admission
from spear_sandbox.pool.backends import BwrapBackend, WarmBackend, WeakBackend
from spear_sandbox.pool.cgroups import Groups, choose_places, find_memory_limit
from spear_sandbox.pool.runs import Backend, carry_out, make_job
from spear_sandbox.pool.zygotes import LostRunError, RefusedError, lack_memory
from spear_sandbox.protocol import FaultKind, Health, Isolation, Limits, Outcome, SandboxFault
from spear_sandbox.selftest import Probe, probe_backend
from spear_sandbox.sessions import LocalSession

logger = logging.getLogger(__name__)

EXIT_CODE = 78
"""Exit code of a service if no isolation holds: EX_CONFIG."""
GUEST_UID = 10001
"""User of the programs where the pool belongs to root."""

_STRONG = (Isolation.NAMESPACES, Isolation.BWRAP)
_REMEDY = (
    "To fix it: in a container, start it with the seccomp profile spear_sandbox/deploy/seccomp.json and all of /proc "
    "(docker run --security-opt seccomp=… --security-opt systempaths=unconfined; "
    "with AppArmor also apparmor=unconfined; podman: unmask=ALL); "
    "on a host, allow user namespaces (sysctl user.max_user_namespaces=10000, "
    "kernel.unprivileged_userns_clone=1 on Debian, kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu). "
    "To accept weaker isolation, say so: --allow-weak-isolation landlock, or isolation='landlock' in Python."
)
_APPARMOR = (
    "'Permission denied' for a mount comes from AppArmor's profile for containers: start the container with "
    "--security-opt apparmor=unconfined, or load spear_sandbox/deploy/apparmor.profile and name it: "
    "apparmor=spear-sandbox. "
)


class IsolationRefusedError(SandboxFault):
    """No permitted level holds here; the message names the failed probes, the remedy and the flag."""

    def __init__(self, message: str) -> None:
        super().__init__(FaultKind.UNAVAILABLE, message)


async def choose_backend(
    isolation: str, installation: Installation, *, zygotes: int, uid: int = GUEST_UID, limits: Limits | None = None
) -> Backend:
    """Start this level or, for ``"auto"``, the first strong one that holds, or raise IsolationRefusedError."""
    failures = []
    for level in _STRONG if isolation == "auto" else (Isolation(isolation),):
        backend = _make_backend(level, installation, zygotes=zygotes, uid=uid, limits=limits or Limits())
        try:
            probes = await _test(backend, uid)
        except BaseException:  # cancelled
            await backend.close()
            raise
        failed = [probe for probe in probes if not probe.ok]
        if not failed:
            if level.weak:
                logger.warning("weak isolation %r: programs share this machine with everything else", level.value)
            return backend
        await backend.close()
        shown = "; ".join(f"probe {probe.name!r} failed ({probe.detail})" for probe in failed[:3])
        failures.append(f"{level.value}: {shown}")
    shown = ". ".join(failures)
    first = _APPARMOR if "mount" in shown and "Permission denied" in shown else ""
    raise IsolationRefusedError(f"No isolation holds here. {shown}. {first}{_REMEDY}")


async def examine(level: Isolation, *, uid: int = GUEST_UID, installation: Installation | None = None) -> list[Probe]:
    """Run every probe of this level; the first is its start."""
    found = installation or find_installation()
    backend = _make_backend(level, found, zygotes=1, uid=uid, limits=Limits())
    try:
        return await _test(backend, uid)
    finally:
        await backend.close()


async def _test(backend: Backend, uid: int) -> list[Probe]:
    try:
        await backend.start()
    except (RefusedError, SandboxFault, OSError) as error:
        return [Probe("start", False, str(error))]
    return [Probe("start", True, ""), *await probe_backend(backend, uid=uid)]


def _make_backend(level: Isolation, installation: Installation, *, zygotes: int, uid: int, limits: Limits) -> Backend:
    if sys.platform != "linux":
        raise IsolationRefusedError("The sandbox needs Linux: run it in a container or on another host.")
    groups = Groups.find()
    if level is Isolation.NAMESPACES:
        return WarmBackend(installation, zygotes=zygotes, uid=uid, groups=groups)
    kind = BwrapBackend if level is Isolation.BWRAP else WeakBackend
    return kind(level, installation, uid=uid, limits=limits, groups=groups)


REFUSED_S = 60.0
"""How long a refusal is remembered."""
MEMORY_WAIT_S = 0.5
"""How long a run whose memory others took waits before its second try."""
LOST_TRIES = 3
"""How often a run is started if something outside ends it."""
LOST_WITHIN_S = 5.0
"""One that had run for longer is not started again: the caller's time is bounded."""


class LocalExecutor:
    """An :class:`~spear_sandbox.protocol.Executor` without a service. Belongs to one event loop.

    It starts at the first run or with :meth:`start`, tests the isolation from inside a run, and refuses to run without
    it.

    Args:
        isolation: ``"auto"`` takes the first of ``namespaces`` and ``bwrap`` that holds; a weaker level must be named.
        limits: Defaults and upper bounds of each run.
        max_running: Runs at a time; None for two per core that this process may use, but no more than fit into the
            memory of its container at these limits. More wait in order of arrival.
        zygotes: Warm interpreters of each kind; None for one per four cores, eight at most.
        installation: The programs' interpreter and packages; None for this process's, with numpy, scipy and sympy if
            they are installed.
        uid: User of the programs if this process is root.
    """

    def __init__(
        self,
        isolation: str = "auto",
        *,
        limits: Limits | None = None,
        max_running: int | None = None,
        zygotes: int | None = None,
        installation: Installation | None = None,
        uid: int = GUEST_UID,
    ) -> None:
        if isolation != "auto":
            isolation = Isolation(isolation).value
        if uid < 1:
            raise ValueError(f"uid={uid}: give a user that is not root.")
        cores = len(os.sched_getaffinity(0))
        self.limits = limits or Limits()
        self.max_running = max_running or choose_places(cores, self.limits, find_memory_limit())
        self._isolation = isolation
        self._zygotes = zygotes or max(1, min(8, cores // 4))
        self._installation = installation or find_installation()
        self._uid = uid
        self._admission = Admission(self.max_running, 1 << 30)
        self._backend: Backend | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False
        self._sessions: weakref.WeakSet[LocalSession] = weakref.WeakSet()
        self._refusal: IsolationRefusedError | None = None
        self._refused_until = 0.0

    async def start(self) -> Isolation:
        """Start and test the isolation, once; return the level that holds.

        Raises IsolationRefusedError, with the failed probe, the remedy and the flag, if none does.
        """
        return (await self._started()).level

    async def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        """See :meth:`spear_sandbox.protocol.Executor.run`."""
        bounds = (limits or self.limits).cut(self.limits)
        job = make_job(code, files, fetch_files, bounds)
        lost = starved = 0
        while True:
            arrived = time.monotonic()
            try:
                return await self._run(job, stdin, bounds)
            except LostRunError:
                lost += 1
                if lost == LOST_TRIES or time.monotonic() - arrived > LOST_WITHIN_S:
                    raise
            except SandboxFault as fault:
                starved += 1
                if fault.kind is not FaultKind.MEMORY or starved > 1:
                    raise
                await asyncio.sleep(MEMORY_WAIT_S)  # by then those that took it are dead or at their own limits

    async def _run(self, job: Job, stdin: str | None, bounds: Limits) -> Outcome:
        arrived = time.monotonic()
        backend = await self._started()
        await self._admission.enter(None)
        try:
            if self._closed:
                raise _closed()
            queue_s = time.monotonic() - arrived
            async with backend.borrow(job["code"]) as fork:
                return await carry_out(
                    job,
                    stdin,
                    bounds,
                    backend.level,
                    fork,
                    ending=backend.ending,
                    queue_s=queue_s,
                    groups=backend.groups,
                )
        except SandboxFault as fault:
            if self._closed:  # closing killed the run: its own error says less
                raise _closed() from fault
            raise
        except OSError as error:  # this process has too many open files, say
            if error.errno == errno.ENOMEM:
                raise lack_memory(str(error)) from error
            raise SandboxFault(FaultKind.UNAVAILABLE, f"the run could not be started or followed: {error}") from error
        finally:
            self._admission.leave()

    async def open_session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> LocalSession:
        """Start a session; it lasts until it or this executor is closed, a day at most.

        Args:
            files: Relative name → content; written into its working folder.
            limits: As for :meth:`run`; ``wall_s`` is that of one cell.

        Raises:
            SandboxFault: It could not be started, or the isolation that holds here has no sessions.
            ValueError: A file name leaves the working folder.
        """
        backend = await self._started()
        if backend.level is not Isolation.NAMESPACES:
            raise SandboxFault(
                FaultKind.UNAVAILABLE, f"sessions need the isolation 'namespaces', not {backend.level.value!r}"
            )
        bounds = (limits or self.limits).cut(self.limits)
        session = await LocalSession.open(backend, self._admission, bounds, files)
        self._sessions.add(session)
        return session

    def health(self) -> Health:
        """Return the state of the pool. Raises SandboxFault if it has not been started, or is closed."""
        if self._backend is None:
            raise SandboxFault(FaultKind.UNAVAILABLE, "the sandbox has not been started")
        return self._backend.health()

    async def close(self) -> None:
        """See :meth:`spear_sandbox.protocol.Executor.close`."""
        self._closed = True
        await asyncio.gather(*(session.close() for session in self._sessions))
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    async def _started(self) -> Backend:
        if self._closed:
            raise _closed()
        if self._backend is None:
            if self._starting is None:
                if self._refusal is not None and time.monotonic() < self._refused_until:
                    raise self._refusal
                self._starting = asyncio.ensure_future(self._start())
            starting = self._starting
            try:
                # One caller that gives up must not end the start for the others.
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                if starting.cancelled():
                    raise _closed() from None
                raise
            if self._backend is None:
                raise _closed()
        return self._backend

    async def _start(self) -> None:
        try:
            self._backend = await choose_backend(
                self._isolation, self._installation, zygotes=self._zygotes, uid=self._uid, limits=self.limits
            )
        except IsolationRefusedError as error:
            # The test takes seconds, and each run would repeat it.
            self._refusal, self._refused_until = error, time.monotonic() + REFUSED_S
            raise
        finally:
            self._starting = None


def _closed() -> SandboxFault:
    return SandboxFault(FaultKind.UNAVAILABLE, "the sandbox is closed")
