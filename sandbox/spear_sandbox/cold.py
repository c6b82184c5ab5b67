"""Levels that start an interpreter for each run: ``bwrap``, and the weak ones, ``landlock`` and ``none``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from spear_sandbox.cgroups import Groups
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
from spear_sandbox.installation import Installation
from spear_sandbox.protocol import Health, Isolation, Limits
from spear_sandbox.runs import Backend, Fork
from spear_sandbox.zygotes import RefusedError, end_process


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
        """What holds here, for ``/health``."""

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
        held.callback(shutil.rmtree, base, ignore_errors=True)
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
