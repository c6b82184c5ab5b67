"""A run in an interpreter started for it: inside bubblewrap, or with weak isolation."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from spear_sandbox.guest import kernel, program, supervisor
from spear_sandbox.guest.job import Job, read_job
from spear_sandbox.guest.locks import LockKeeper, can_listen
from spear_sandbox.guest.seccomp import Locks, build_filter, load_filter

_ROOM_FOR_OTHERS = 4
"""Factor by which the kernel's bound exceeds that of one run: runs of one user count together."""


class _EndedError(BaseException):
    """The pool wants the run to end."""


def start_cold() -> Callable[[], None]:
    """Supervise a run; in the forked child, return what runs the program.

    The arguments are the level, the working folder, what Landlock leaves readable, separated by colons, and the numbers
    of the descriptors of the job, stdout, stderr, the report, control groups and, perhaps, stdin.
    """
    level, folder, readable, *numbers = sys.argv[1:]
    job_fd, out, error, report_fd, *others = (int(number) for number in numbers)
    try:
        supervisor.reset_signals()
        job = read_job(job_fd)
        report_fd = supervisor.place_descriptors(job, out, error, report_fd, supervisor.enter_groups(job, others))
        os.chdir(folder)
        apart = level == "bwrap"
        if apart:
            resource.setrlimit(resource.RLIMIT_NPROC, (job["processes"], job["processes"]))
        else:
            signal.signal(signal.SIGTERM, _end)
            kernel.die_with_parent(signal.SIGTERM)  # no pid namespace ends with this process
            if _is_closed(report_fd):  # the pool had ended before
                os._exit(1)
            kernel.become_subreaper()
            _limit_user(job["processes"])
        kernel.deny_new_privileges()
        kernel.clear_dumpable()
        baseline = program.measure_address_space()
        keeper = None
        if apart and can_listen():  # on top of bubblewrap's filter, which leaves locks alone
            keeper = LockKeeper(load_filter(build_filter(), listen=True), folder)
        elif apart:
            load_filter(build_filter(locks=Locks.RECORDS))
        # From here on only _supervise() may act on it, which ends the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            kernel.set_dumpable()
            program.write_files(job, folder)
            program.set_limits(job, baseline)
            if level == "landlock":
                kernel.restrict_paths(readable.split(":"), [folder])
                load_filter(build_filter(own_process=os.getpid(), locks=Locks.ALLOW))
            # By default each thread that allocates reserves 64 MiB and more of the address space.
            kernel.share_arenas(2)
            program.make_streams()
            program.hide_own_modules()
            return program.hand_over(job, folder)
        _supervise(child, job, folder, apart, keeper)
    except BaseException as failure:
        supervisor.report_failure(failure, report_fd)
        os._exit(1)


def _supervise(child: int, job: Job, folder: str, apart: bool, keeper: LockKeeper | None) -> NoReturn:
    for fd in (0, 1, 2):
        os.close(fd)
    own = str(os.getpid())

    def processes() -> Iterator[str]:
        return (name for name in os.listdir("/proc") if name.isdigit() and name != own) if apart else _list_below(own)

    def kill() -> None:
        if apart:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return
        for process in _list_below(own):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(process), signal.SIGKILL)

    def exceeds() -> bool:
        disk = os.statvfs(folder)
        if apart and disk.f_files - disk.f_ffree > job["inodes"]:
            return True
        return not apart and sum(1 for _ in processes()) > job["processes"]

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        elsewhere = supervisor.hold_in_sockets if apart else None
        record = supervisor.supervise(child, job, folder, processes, kill, exceeds, elsewhere, keeper)
    except _EndedError:
        supervisor.end_all(child, kill)
        os._exit(1)
    supervisor.report(record)
    os._exit(0)


def _is_closed(pipe: int) -> bool:
    """Return whether nobody can read from a pipe any more."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _EndedError


def _list_below(ancestor: str) -> Iterator[str]:
    """Return the process ids of the descendants."""
    parents: dict[str, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents[name] = file.read().rpartition(b")")[2].decode().split()[1]  # state, parent, and so on
    known = {ancestor}
    while below := {name for name, parent in parents.items() if parent in known} - known:
        known |= below
    return iter(known - {ancestor})


def _limit_user(processes: int) -> None:
    """Limit how many more processes and threads the user may have; others of the same user count, too."""
    uid, running = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            # Not the owner of the folder, which is root if the process is not dumpable.
            with contextlib.suppress(OSError, LookupError, ValueError), open(f"/proc/{name}/status", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read().splitlines())
                if int(fields[b"Uid"].split()[0]) == uid:
                    running += int(fields[b"Threads"])
    most = running + _ROOM_FOR_OTHERS * processes
    highest = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = most if highest == resource.RLIM_INFINITY else min(most, highest)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
