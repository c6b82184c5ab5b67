"""Backends: warm interpreters of ``namespaces``, kept alive and replaced; cold ones of ``bwrap`` and weak levels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spear_sandbox.guest.root import (
    CODE,
    DEVICES,
    ENVIRONMENT,
    HELPERS,
    LINKED_FOLDERS,
    SITE,
    SYSTEM_FILES,
    list_folders,
    list_hidden,
    list_parents,
)
from spear_sandbox.guest.seccomp import Locks, build_filter
from spear_sandbox.guest.supervisor import OOM_SCORE
from spear_sandbox.guest.zygote import SESSIONS
from spear_sandbox.installation import Installation
from spear_sandbox.pool.cgroups import Groups
from spear_sandbox.pool.runs import Backend, Fork
from spear_sandbox.pool.zygotes import RefusedError, Zygote, end_process, start_zygote
from spear_sandbox.protocol import FaultKind, Health, Isolation, Limits, SandboxFault

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


class _ColdBackend(Backend, ABC):
    """What the levels of this module share."""

    ending = signal.SIGKILL

    def __init__(
        self, level: Isolation, installation: Installation, *, uid: int, limits: Limits, groups: Groups | None = None
    ) -> None:
        self.level = level
        self.groups = groups
        self._installation = installation
        self._user = uid if os.getuid() == 0 else None
        self._drop: dict[str, Any] = {} if os.getuid() else {"user": uid, "group": uid, "extra_groups": []}
        self._limits = limits
        self._processes: set[subprocess.Popen[bytes]] = set()

    def health(self) -> Health:
        return Health(self.level, self._features() | {"cgroup": self.groups is not None}, 0, 0, ok=True)

    async def close(self) -> None:
        for process in self._processes:
            process.send_signal(self.ending)
        await asyncio.gather(*(end_process(process) for process in list(self._processes)))
        if self.groups is not None:
            self.groups.close()

    @abstractmethod
    def _features(self) -> dict[str, bool]:
        """Return what holds here, for ``/health``."""

    def _start(
        self, command: list[str], descriptors: Sequence[int], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            # Where memory is short, runs are killed first. Inside, /proc is read-only.
            ["/bin/sh", "-c", f'echo {OOM_SCORE} > /proc/self/oom_score_adj; exec "$@"', "sh", *command],
            pass_fds=descriptors,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            **self._drop,
        )
        self._processes.add(process)
        return process

    @contextlib.asynccontextmanager
    async def borrow(self, code: str) -> AsyncIterator[Fork]:
        async with contextlib.AsyncExitStack() as held:

            async def fork(descriptors: Sequence[int]) -> int:
                process = self._launch(descriptors, held)
                held.callback(self._processes.discard, process)
                held.push_async_callback(end_process, process)
                return os.pidfd_open(process.pid)

            yield fork

    @abstractmethod
    def _launch(self, descriptors: Sequence[int], held: contextlib.AsyncExitStack) -> subprocess.Popen[bytes]:
        """Start the interpreter of a run; ``held`` is closed after its end."""

    def _check_reach(self) -> bool:
        """Start the interpreter as the programs' user, or raise RefusedError; tell whether supervisors keep locks."""
        source = str(Path(self._installation.guest).parent.parent)
        ask = f"import sys; sys.path.insert(0, {source!r}); from spear_sandbox.guest.locks import can_listen; "
        command = [self._installation.interpreter, "-I", "-S", "-c", ask + "print(can_listen())"]
        try:
            done = subprocess.run(command, env={}, cwd="/", check=True, capture_output=True, timeout=60, **self._drop)
        except (OSError, subprocess.SubprocessError) as error:
            user = os.getuid() if self._user is None else self._user
            raise RefusedError(f"user {user} cannot start {self._installation.interpreter}: {error}") from None
        return done.stdout == b"True\n"


class BwrapBackend(_ColdBackend):
    """The isolation of ``namespaces`` by bubblewrap 0.8 or later."""

    _bwrap: str | None = None
    _program = b""
    _keeps_locks = False

    async def start(self) -> None:
        self._bwrap = shutil.which("bwrap")
        if self._bwrap is None:
            raise RefusedError("bubblewrap (bwrap) is not installed")
        self._keeps_locks = self._check_reach()
        self._program = build_filter(locks=Locks.ALLOW, stacked=True)

    def _launch(self, descriptors: Sequence[int], held: contextlib.AsyncExitStack) -> subprocess.Popen[bytes]:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.write(write_end, self._program)  # smaller than a pipe
        os.close(write_end)
        try:
            return self._start(self._write_command(read_end, descriptors), [*descriptors, read_end], {})
        finally:
            os.close(read_end)

    def _write_command(self, program: int, descriptors: Sequence[int]) -> list[str]:
        installation = self._installation
        folders = list_folders(installation.prefix)
        assert self._bwrap is not None
        command = [self._bwrap, "--unshare-all", "--unshare-user", "--die-with-parent"]
        command += ["--new-session", "--as-pid-1", "--clearenv"]
        command += ["--hostname", "sandbox", "--cap-drop", "ALL", "--seccomp", str(program)]
        for name, value in ENVIRONMENT.items():
            command += ["--setenv", name, value]
        for parent in list_parents(installation.prefix):
            command += ["--perms", "0111", "--dir", parent]
        for folder in folders:
            command += ["--ro-bind", folder, folder]
        for path in LINKED_FOLDERS:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
        for path in SYSTEM_FILES:
            command += ["--ro-bind-try", os.path.realpath(path), path]
        for name, path in installation.packages.items():
            command += ["--ro-bind", path, f"{SITE}/{name}"]
        for name, path in installation.helpers.items():
            command += ["--ro-bind", path, f"{HELPERS}/{name}"]
        command += ["--ro-bind", installation.guest, f"{CODE}/spear_sandbox/guest"]
        for path in list_hidden(folders):
            command += ["--tmpfs", path, "--remount-ro", path]
        for name in DEVICES:
            command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        command += ["--symlink", "/tmp", "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd"]
        command += ["--proc", "/proc", "--remount-ro", "/proc"]
        command += ["--size", str(self._limits.disk_mb << 20), "--perms", "1777", "--tmpfs", "/tmp"]
        command += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
        return [*command, *_write_interpreter(installation, CODE, SITE, self.level, "/tmp", [], descriptors)]

    def _features(self) -> dict[str, bool]:
        held = dict.fromkeys(("userns", "pidns", "netns", "seccomp", "disk"), True)
        return held | {"landlock": False, "locks": self._keeps_locks, "users": False}


class WeakBackend(_ColdBackend):
    """Levels ``landlock`` and ``none``: programs live among all other processes of this machine."""

    # The supervisor must kill what it supervises: no pid namespace ends with it.
    ending = signal.SIGTERM

    async def start(self) -> None:
        self._check_reach()

    def _launch(self, descriptors: Sequence[int], held: contextlib.AsyncExitStack) -> subprocess.Popen[bytes]:
        base = Path(tempfile.mkdtemp(prefix="sandbox-"))
        held.callback(_remove, base)
        work, site = base / "work", base / "site"
        base.chmod(0o755)
        work.mkdir()
        site.mkdir()
        if self._user is not None:
            os.chown(work, self._user, self._user)
        installation = self._installation
        for name, path in {**installation.helpers, **installation.packages}.items():
            (site / name).symlink_to(path)
        shown = [*list_folders(installation.prefix), *SYSTEM_FILES, *LINKED_FOLDERS, *installation.packages.values()]
        shown += installation.helpers.values()
        shown += [installation.guest, str(site), *(f"/dev/{name}" for name in DEVICES)]
        readable = sorted({os.path.realpath(path) for path in shown if os.path.exists(path)})
        source = str(Path(installation.guest).parent.parent)
        command = _write_interpreter(installation, source, str(site), self.level, str(work), readable, descriptors)
        folders = dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR"), str(work))
        return self._start(command, descriptors, ENVIRONMENT | folders | {"PYTHONPATH": str(site)})

    def _features(self) -> dict[str, bool]:
        held = self.level is Isolation.LANDLOCK
        # Files are on the host's disk, and nobody counts them.
        nothing = dict.fromkeys(("userns", "pidns", "netns", "disk", "locks", "users"), False)
        return nothing | {"seccomp": held, "landlock": held}


def _remove(base: Path) -> None:
    """Remove the folders of a run that has ended."""
    shutil.rmtree(base, ignore_errors=True)
    if base.exists():  # without root it belongs to the program's user, who may have taken rights away
        for folder, names, _ in os.walk(base):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    _open_up(path)
        shutil.rmtree(base, ignore_errors=True)


def _open_up(folder: str) -> None:
    """Allow its owner everything in a folder, which is not reached through a link."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def _write_interpreter(
    installation: Installation,
    code: str,
    site: str,
    level: Isolation,
    folder: str,
    readable: Sequence[str],
    descriptors: Sequence[int],
) -> list[str]:
    boot = (
        f"import sys; sys.path.insert(0, {code!r}); sys.path.append({site!r}); "
        "from spear_sandbox.guest.cold import start_cold; start_cold()()"
    )
    numbers = [str(number) for number in descriptors]
    return [installation.interpreter, "-I", "-S", "-c", boot, level.value, folder, ":".join(readable), *numbers]
