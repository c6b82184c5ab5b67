"""The first process of a run: watches time and memory, kills what is left, and reports."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions make enums of all that they take and give
import contextlib
import errno
import fnmatch
import os
import resource
import select
import stat
import time
from collections.abc import Callable, Iterator, Sequence

from spear_sandbox.guest import kernel
from spear_sandbox.guest.job import Job, Record, Verdict, pack_record
from spear_sandbox.guest.locks import LockKeeper

REPORT_FD = 3
CONTROL_FD = 4
REST, GO_ON, INTERRUPT = b"r", b"g", b"i"
"""Orders to the supervisor of a session."""
OOM_SCORE = 1000
"""Score by which runs are killed first where memory is short."""
_MIB = 1 << 20
_LOOK_EVERY_S = 0.05
_LOOK_AT_REST_S = 2.0
_LOOK_SOON_S = 0.5
"""Seconds until the next look after an order to rest, and after something has woken all the same."""
_MOST_WAKINGS = 3
"""Wakings of a resting session that end it: only a program that sends itself SIGCONT by timers wakes at all."""
_INTERRUPT_EVERY_S = 0.01
_SUM_FACTOR = 1.5
_FETCHED_BYTES = 16 << 20
"""Bytes of a fetched file: enough for a compiled program with tables in it."""
_FETCHED_TOTAL = 64 << 20
"""Bytes of all fetched files: holes take no room in the working folder, but they do here."""
_FETCHED_BY_PATTERN = 64
_SOCKET_BYTES = 256 << 10
"""Bytes that one socket can hold: programs cannot change the size of its buffer."""

Processes = Callable[[], Iterator[str]]


def supervise(
    child: int,
    job: Job,
    folder: str,
    processes: Processes,
    kill: Callable[[], None],
    exceeds: Callable[[], bool] | None = None,
    elsewhere: Callable[[], int] | None = None,
    keeper: LockKeeper | None = None,
    control: int | None = None,
) -> Record:
    """Wait for the program or end it; afterwards only the caller is left of the run.

    Args:
        child: The program's process.
        processes: Names of the folders in /proc of all processes of the run.
        kill: Kills all of them.
        exceeds: Whether the run exceeds another limit that the kernel does not enforce.
        elsewhere: Bytes of memory that the run holds and that are not accounted to its processes.
        keeper: Answers about locks.
        control: Source of a session's orders: to rest, to resume, to interrupt its program.
    """
    started = time.monotonic()
    most_bytes = int(job["memory_mb"] * _SUM_FACTOR) * _MIB

    def exceeds_any() -> bool:
        if exceeds is not None and exceeds():
            return True
        left = most_bytes - (elsewhere() if elsewhere is not None else 0)
        # The rough sum is cheap and never too small. Only where it is too large the exact one walks the page tables.
        return _sum_memory(processes(), exactly=False) > left and _sum_memory(processes(), exactly=True) > left

    watch = _Watch(child, processes, exceeds_any, keeper, control)
    verdict = watch.wait(started + job["wall_s"])
    watch.close()
    wall_s = time.monotonic() - started
    status, peak_rss_kb = end_all(child, kill)
    total = resource.getrusage(resource.RUSAGE_CHILDREN)
    files = dict(fetch_files(folder, job["fetch_files"])) if verdict == Verdict.ITSELF else {}
    return Record(verdict, status, total.ru_utime + total.ru_stime, wall_s, peak_rss_kb, files)


def end_all(child: int, kill: Callable[[], None]) -> tuple[int, int]:
    """Kill and wait for everything; return wait status and peak KiB of the program's process."""
    status, peak_rss_kb = 0, 0
    kill()
    while True:
        try:
            pid, ended_with, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, peak_rss_kb
        if pid == child:
            status, peak_rss_kb = ended_with, usage.ru_maxrss
        # Its children that were forked in the meantime are orphans now, and children of this process.
        kill()


class _Watch:
    """Waits for the end of the program, watches memory, answers about locks and obeys orders; see :func:`supervise`."""

    def __init__(
        self,
        child: int,
        processes: Processes,
        exceeds: Callable[[], bool],
        keeper: LockKeeper | None,
        control: int | None,
    ) -> None:
        self._child = child
        self._processes = processes
        self._exceeds = exceeds
        self._resting = False
        self._wakings = 0
        self._interrupting = False
        # Blocked signals reach this process even as process 1, which drops unblocked ones without a handler.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGCHLD})
        self._signals = kernel.open_child_signals()
        self._keeper = keeper
        self._control = control
        self._events = select.poll()
        for fd in (self._signals, control, keeper.listener if keeper is not None else None):
            if fd is not None:
                self._events.register(fd, select.POLLIN)

    def wait(self, deadline: float) -> int:
        """Wait and return why the run is over."""
        self._look_every(_LOOK_EVERY_S)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return Verdict.TIMEOUT
            if _reap(self._child):
                return Verdict.ITSELF
            if self._interrupting:
                self._interrupt()
            pause = _INTERRUPT_EVERY_S if self._interrupting else self._pause
            for fd, _ in self._events.poll(max(1, min(pause, left) * 1000)):
                if fd == self._signals:
                    os.read(fd, 4096)
                elif fd == self._control:
                    self._obey(os.read(fd, 1))
                elif self._keeper is not None:
                    self._keeper.answer()
            if time.monotonic() < self._look:  # ends of children and signals of the program are much more frequent
                continue
            woken = self._resting and self._has_woken()
            self._wakings += woken
            if self._wakings == _MOST_WAKINGS:
                return Verdict.TIMEOUT
            if self._exceeds():
                return Verdict.MEMORY
            self._look_every(_LOOK_EVERY_S if not self._resting else _LOOK_SOON_S if woken else _LOOK_AT_REST_S)

    def _look_every(self, seconds: float) -> None:
        """Look next after these seconds, or after half of them if something else happens then."""
        self._pause = seconds
        self._look = time.monotonic() + seconds / 2

    def close(self) -> None:
        """Close the descriptor of signals."""
        os.close(self._signals)

    def _obey(self, order: bytes) -> None:
        if order == REST:
            self._resting, self._interrupting, self._wakings = True, False, 0
            kernel.kill_all(_signal.SIGSTOP)
            self._look_every(_LOOK_SOON_S)
        elif order == GO_ON:
            self._resting = False
            self._look_every(_LOOK_EVERY_S)
            kernel.kill_all(_signal.SIGCONT)
        elif order == INTERRUPT:
            self._interrupting = True
        else:  # the pool has hung up
            self._events.unregister(self._control or 0)

    def _interrupt(self) -> None:
        """Interrupt the cell as soon as it runs: before that its process ignores the signal, so it would be lost."""
        with contextlib.suppress(OSError, ValueError):
            if not _ignores(self._child, _signal.SIGINT):
                self._interrupting = False
                os.kill(self._child, _signal.SIGINT)

    def _has_woken(self) -> bool:
        """Return whether any thread runs that should rest; if so, stop everything again.

        A process whose first thread has ended looks like a zombie while its other threads run.
        """
        if all(state in b"TtZX" for process in self._processes() for state in _read_states(process)):
            return False
        kernel.kill_all(_signal.SIGSTOP)
        return True


def _read_states(process: str) -> Iterator[bytes]:
    """Yield the state of each thread."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/stat", "rb") as file:
                yield file.read().rpartition(b")")[2][1:2]


def _ignores(process: int, number: int) -> bool:
    """Return whether a process ignores a signal. Raises OSError if it has ended."""
    with open(f"/proc/{process}/status", "rb") as file:
        ignored = file.read().rpartition(b"\nSigIgn:")[2].split(maxsplit=1)[0]
    return bool(int(ignored, 16) >> (number - 1) & 1)


def _reap(child: int) -> bool:
    """Return whether the program has ended. Reaps orphans, each of which counts among the run's processes."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)


def _sum_memory(processes: Iterator[str], *, exactly: bool) -> int:
    """Return the bytes of private and shared memory that the processes hold.

    Not exactly: shared pages count once for each process. Exactly, and slower: they count once in all, and those shared
    with the warm interpreter hardly at all. A process that is not dumpable counts in full.
    """
    return sum(_find_memory(f"/proc/{process}", exactly) for process in processes) << 10


def _find_memory(folder: str, exactly: bool) -> int:
    """Return the KiB of one process. If its first thread has ended, another thread tells."""
    found = _read_memory(folder, exactly)
    if found is None:
        with contextlib.suppress(OSError):
            threads = (f"{folder}/task/{thread}" for thread in os.listdir(f"{folder}/task"))
            found = next((held for thread in threads if (held := _read_memory(thread, exactly)) is not None), None)
    return found or 0


def _read_memory(folder: str, exactly: bool) -> int | None:
    """Return the KiB of a process or thread; None if it has ended."""
    try:
        if exactly:
            with contextlib.suppress(PermissionError, ValueError):
                return _read_sum(f"{folder}/smaps_rollup", b"\nPss_Anon:", b"\nPss_Shmem:")
        return _read_sum(f"{folder}/status", b"\nRssAnon:", b"\nRssShmem:")
    except (OSError, ValueError):
        return None


def hold_in_sockets() -> int:
    """Return the bytes that the sockets of this network namespace may hold; no process accounts for them."""
    with contextlib.suppress(OSError, ValueError):
        return _read_sum("/proc/net/sockstat", b"sockets: used ") * _SOCKET_BYTES
    return 0


def _read_sum(path: str, *names: bytes) -> int:
    """Sum the numbers after these names. Raises ValueError if one is missing."""
    # The names start with a line break: a process can take any name, but not one with a line break.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 8192)
    finally:
        os.close(fd)
    return sum(int(text[text.index(name) + len(name) :].split(maxsplit=1)[0]) for name in names)


def fetch_files(folder: str, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of regular files below ``folder``, 16 MiB each and 64 MiB in all at most.

    Links are not followed. A name with ``*``, ``?`` or ``[`` matches files of the folder itself, 64 at most.
    """
    left = _FETCHED_TOTAL
    for asked in names:
        found = [asked]
        if any(sign in asked for sign in "*?["):
            found = []
            with contextlib.suppress(OSError):  # the program may have closed the folder
                found = sorted(fnmatch.filter(os.listdir(folder), asked))[:_FETCHED_BY_PATTERN]
        for name in found:
            content = None
            with contextlib.suppress(OSError, ValueError):
                content = _read_below(folder, name.split("/"), min(left, _FETCHED_BYTES))
            if content is not None:
                left -= len(content)
                yield name, content


def _read_below(folder: str, parts: list[str], most: int) -> bytes | None:
    with contextlib.ExitStack() as opened:

        def keep(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        parts = [part for part in parts if part not in ("", ".")]
        here = keep(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in parts[:-1]:
            here = keep(os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here))
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        last = keep(os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here))
        found = os.fstat(last)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return None
        return os.read(last, found.st_size)


def report(record: Record, fd: int = REPORT_FD) -> None:
    """Write the record for the pool."""
    rest = memoryview(pack_record(record))
    while rest:
        rest = rest[os.write(fd, rest) :]


def report_failure(error: BaseException, fd: int = REPORT_FD) -> None:
    """Report that the run could not be started."""
    starved = isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
    verdict = Verdict.STARVED if starved else Verdict.NOT_STARTED
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:4096]
    with contextlib.suppress(OSError):
        report(Record(verdict, 0, 0.0, 0.0, 0, {"": text}), fd)


def enter_groups(job: Job, others: list[int]) -> list[int]:
    """Enter the control groups whose entrances come first among these descriptors; return the rest."""
    count = job["groups"]
    kernel.enter_groups(others[:count])
    return others[count:]


def place_descriptors(job: Job, out: int, error: int, report_fd: int, others: Sequence[int]) -> int:
    """Move descriptors where programs and the supervisor expect them and close all others; return the report's.

    ``others`` follow the report and the control groups: a session's orders and stdin, if the job has them. All must be
    above 4, or be the report at 3.
    """
    # Each target is below all sources, so no descriptor is overwritten before it has been moved.
    rest = list(others)
    control = rest.pop(0) if job["session"] else None
    # Not the one that was inherited: flags of an open file are common to all that have it.
    os.dup2(rest[0] if rest else os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.dup2(report_fd, REPORT_FD)
    if control is not None:
        os.dup2(control, CONTROL_FD)
    kernel.close_from(REPORT_FD + 1 if control is None else CONTROL_FD + 1)
    return REPORT_FD


def reset_signals() -> None:
    """Remove handlers: the program may signal its supervisor, and only signals with a handler would reach it."""
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
