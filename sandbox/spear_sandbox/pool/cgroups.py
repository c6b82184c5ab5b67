"""Control groups: what this process may hold, whom the kernel killed for memory, and a group for each run."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

from spear_sandbox.protocol import Limits

_MIB = 1 << 20
_UNLIMITED = 1 << 60
_RESERVED_MB = 512
"""MiB of a container that are kept for the service and the warm interpreters."""
_KERNEL_MB = 16
"""MiB that the kernel itself may hold for a run: page tables, pipes, sockets."""
_CHARGED_AT_ONCE = 1 << 20
"""Bytes that a group at its limit may lack: the kernel takes memory for a processor in advance."""
_SPARE_PROCESSES = 4
"""Processes granted to the supervisor and bubblewrap; ``RLIMIT_NPROC`` also bounds the program's own."""
_PROC = Path("/proc")
_PREFIX = "spear-"


class OomKill(Enum):
    """Whom the kernel killed for memory while a run was under way."""

    NONE = "none"
    """No process of the run."""
    OWN = "own"
    """A process of the run, which had reached its own limit."""
    OTHERS = "others"
    """A process of the run, or perhaps another one, was killed below the run's own limit: others held the memory."""


@dataclass(frozen=True)
class _Place:
    """Where a controller's files of this process are."""

    folder: Path
    top: Path
    unified: bool
    """Version 2."""


def _find_place(controller: str, proc: Path = _PROC) -> _Place | None:
    """Return the group of this process for a controller, as far as it can be seen from here."""
    try:
        own = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    for fields in mounts:
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        unified = kind == "cgroup2"
        if not unified and not (kind == "cgroup" and controller in options):
            continue
        names = "" if unified else controller
        path = next((path for _, held, path in own if names in held.split(",")), None)
        root, top = fields[3], Path(fields[4])
        if path is None:
            continue
        below = os.path.relpath(path, root)
        folder = top if below.startswith("..") else top / below
        with contextlib.suppress(OSError):
            if not unified or controller in (folder / "cgroup.controllers").read_text().split():
                return _Place(folder, top, unified)
    return None


def _find_memory_bound(proc: Path) -> tuple[int, _Place] | None:
    """Return the least bytes that a group of this process or one above it allows, and that group."""
    place = _find_place("memory", proc)
    if place is None:
        return None
    name = "memory.max" if place.unified else "memory.limit_in_bytes"
    found = []
    folder = place.folder
    while True:
        with contextlib.suppress(OSError, ValueError):  # "max", and the root, which has none
            found.append((int((folder / name).read_text()), folder))
        if folder in (place.top, folder.parent):
            break
        folder = folder.parent
    least, folder = min(found, default=(_UNLIMITED, place.folder))
    return (least, replace(place, folder=folder)) if least < _UNLIMITED else None


def find_memory_limit(proc: Path = _PROC) -> int | None:
    """Return the bytes that the control groups allow this process and its children, None without a bound."""
    bound = _find_memory_bound(proc)
    return None if bound is None else bound[0]


def lacks_memory(spare: int, proc: Path = _PROC) -> bool:
    """Return whether fewer than ``spare`` bytes of the memory bound are left, or half of it; False without a bound.

    What the kernel can reclaim, such as cached files, counts as free.
    """
    bound = _find_memory_bound(proc)
    if bound is None:
        return False
    limit, place = bound
    names = ("anon", "shmem") if place.unified else ("total_rss", "total_shmem")
    with contextlib.suppress(OSError, LookupError, ValueError):
        held = sum(_read_field(place.folder / "memory.stat", name) for name in names)
        return limit - held < min(spare, limit // 2)
    return False


def most_of_a_run(limits: Limits) -> int:
    """Return the MiB that one run may hold: all its processes, and its files, which are in memory."""
    return limits.memory_mb * 3 // 2 + limits.disk_mb + _KERNEL_MB


def choose_places(cores: int, limits: Limits, memory_bytes: int | None) -> int:
    """Choose how many runs go at a time: two for each core, as far as they fit into the memory (None for no bound)."""
    if memory_bytes is None:
        return 2 * cores
    return max(1, min(2 * cores, ((memory_bytes >> 20) - _RESERVED_MB) // most_of_a_run(limits)))


def _count_oom_kills() -> int:
    """Count whom the kernel has killed for memory: in this process's control group, or on the whole machine."""
    place = _find_own_memory()
    with contextlib.suppress(OSError, LookupError, ValueError):
        if place is not None:
            return _read_oom_kills(place.folder, place.unified)
    with contextlib.suppress(OSError, LookupError, ValueError):
        return _read_field(_PROC / "vmstat", "oom_kill")
    return 0


@cache
def _find_own_memory() -> _Place | None:
    return _find_place("memory")


def _read_field(path: Path, name: str) -> int:
    """Read the number after a name. Raises LookupError if it is not there."""
    return int(dict(line.split(" ", 1) for line in path.read_text().splitlines())[name])


def _read_oom_kills(folder: Path, unified: bool) -> int:
    return _read_field(folder / ("memory.events" if unified else "memory.oom_control"), "oom_kill")


class OomWatch:
    """Whether the kernel has killed anybody for memory since this was made, where runs have no groups."""

    entrances: tuple[int, ...] = ()
    distinguishes_runs = False

    def __init__(self) -> None:
        self._before = _count_oom_kills()

    def judge(self) -> OomKill:
        """Return OTHERS if so, in this process's control group or else on this machine."""
        return OomKill.OTHERS if _count_oom_kills() > self._before else OomKill.NONE


class Group:
    """The control groups of one run at a time: one folder, or, in version 1, one for memory and one for processes."""

    distinguishes_runs = True

    def __init__(self, memory: Path, processes: Path | None, unified: bool) -> None:
        self._memory = memory
        self._processes = processes
        self._unified = unified
        self._set: tuple[int, int] | None = None
        self._before = (0, 0)
        self.abandoned = False
        """Whether the last run may still be dying."""
        folders = [memory] if processes is None or processes == memory else [memory, processes]
        self.folders = folders
        self.entrances = tuple(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in folders)
        """Open files; a process that writes 0 to one enters the group."""

    def prepare(self, limits: Limits) -> None:
        """Set what the next run may hold."""
        wanted = (most_of_a_run(limits) * _MIB, limits.processes + _SPARE_PROCESSES)
        if wanted != self._set:
            self._limit_memory(str(wanted[0]))
            if self._processes is not None:
                (self._processes / "pids.max").write_text(str(wanted[1]))
            self._set = wanted
        if self._unified:
            self._before = self._count_kills(), self._count_reached()
        else:
            (self._memory / "memory.max_usage_in_bytes").write_text("0")
            self._before = self._count_kills(), 0

    def _limit_memory(self, most: str) -> None:
        if self._unified:
            (self._memory / "memory.max").write_text(most)
            with contextlib.suppress(OSError):  # without swap there is no such file
                (self._memory / "memory.swap.max").write_text("0")
            return
        plain, swap = self._memory / "memory.limit_in_bytes", self._memory / "memory.memsw.limit_in_bytes"
        # Neither may pass the other, so it depends on the direction which of them goes first.
        with contextlib.suppress(OSError):
            swap.write_text(most)
        plain.write_text(most)
        with contextlib.suppress(OSError):
            swap.write_text(most)

    def judge(self) -> OomKill:
        """Return whom the kernel has killed since :meth:`prepare`.

        In version 1 the limit counts as reached even where giving up cached files was enough.
        """
        if self._count_kills() == self._before[0]:  # as nearly all runs end
            return OomKill.NONE
        return OomKill.OWN if self._count_reached() > self._before[1] else OomKill.OTHERS

    def _count_kills(self) -> int:
        return _read_oom_kills(self._memory, self._unified)

    def _count_reached(self) -> int:
        """Return how often the limit was reached; in version 1, whether it was since the maximum was last reset."""
        if self._unified:
            return _read_field(self._memory / "memory.events", "oom")
        most = int((self._memory / "memory.max_usage_in_bytes").read_text())
        return int(self._set is not None and most >= self._set[0] - _CHARGED_AT_ONCE)

    def is_empty(self) -> bool:
        """Return whether no process is left in the group."""
        with contextlib.suppress(OSError):
            return not any((folder / "cgroup.procs").read_bytes() for folder in self.folders)
        return True  # what is wrong with it shows when it is prepared

    def remove(self) -> None:
        """Remove the group, which must be empty."""
        for fd in self.entrances:
            os.close(fd)
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


class Groups:
    """Groups for runs, below the group of this process for these controllers; made on demand and reused."""

    def __init__(self, memory: _Place, processes: _Place | None) -> None:
        self._memory = memory
        self._processes = processes
        self._made = 0
        self._token = secrets.token_hex(4)
        self._free: deque[Group] = deque()

    @classmethod
    def find(cls, proc: Path = _PROC) -> Groups | None:
        """Return the groups of this process, if it may make any and the kernel counts memory in them."""
        memory, processes = _find_place("memory", proc), _find_place("pids", proc)
        if memory is not None and memory.unified:
            memory = _find_delegated(memory)
            processes = memory
        if memory is None:
            return None
        groups = cls(memory, processes)
        _remove_left(memory.folder)
        if processes is not None:
            _remove_left(processes.folder)
        try:
            groups._free.append(groups._make())
        except OSError:
            return None
        return groups

    @contextlib.contextmanager
    def acquire(self, limits: Limits) -> Iterator[Group]:
        """Lend a group for one run, which must have ended when it comes back."""
        group = self._take()
        try:
            group.prepare(limits)
        except OSError:  # something left in it cannot be freed
            group.remove()
            group = self._make()
            group.prepare(limits)
        try:
            yield group
        except BaseException:  # cancelled, say
            group.abandoned = True
            raise
        finally:
            self._free.append(group)

    def _take(self) -> Group:
        """Take the group that has been free for longest, but none whose abandoned run still holds something."""
        for _ in range(len(self._free)):
            group = self._free.popleft()
            if not group.abandoned or group.is_empty():
                group.abandoned = False
                return group
            self._free.append(group)
        return self._make()

    def close(self) -> None:
        """Remove the groups; all runs have ended."""
        while self._free:
            self._free.pop().remove()

    def _make(self) -> Group:
        self._made += 1
        name = f"{_PREFIX}{os.getpid()}-{self._made}-{self._token}"
        memory = self._memory.folder / name
        memory.mkdir()
        try:
            processes = None
            if self._processes is not None:
                processes = self._processes.folder / name
                processes.mkdir(exist_ok=True)  # in version 2 it is the same
            group = Group(memory, processes, self._memory.unified)
            group.prepare(Limits())  # version 2 has the files only where the controller is passed on
        except OSError:
            for folder in {memory, processes or memory}:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        return group


def _find_delegated(own: _Place) -> _Place | None:
    """Return where version 2 lets this process make groups that count.

    That is its own group if the controllers are already enabled for its children, or the one above if systemd has
    delegated it (``Delegate=memory pids`` with ``DelegateSubgroup=``).
    """
    above = own.folder.parent
    with contextlib.suppress(OSError):
        if "memory" in (own.folder / "cgroup.subtree_control").read_text().split():
            return own
        if own.folder != own.top and os.getxattr(above, "user.delegate") == b"1":
            (above / "cgroup.subtree_control").write_text("+memory +pids")
            return _Place(above, own.top, unified=True)
    return None


def _remove_left(folder: Path) -> None:
    """Remove groups of processes that were killed before they could do so."""
    for left in folder.glob(f"{_PREFIX}*-*-*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not (_PROC / owner).exists():
            with contextlib.suppress(OSError):
                left.rmdir()
