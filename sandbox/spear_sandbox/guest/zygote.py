"""The warm interpreter: it imports what programs need, then forks a disposable sandbox for each request."""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import itertools
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple, NoReturn

from spear_sandbox.guest import kernel, program, supervisor, warmth
from spear_sandbox.guest.job import Job, read_job
from spear_sandbox.guest.locks import LockKeeper, can_listen
from spear_sandbox.guest.program import WORKING_FOLDER
from spear_sandbox.guest.rehearsal import rehearse
from spear_sandbox.guest.seccomp import Locks, build_filter, prepare_filter
from spear_sandbox.guest.users import let_others_read

READY, SPAWN, SPAWNED, FAILED, STARVED = b"R", b"S", b"P", b"F", b"M"
"""STARVED: failed for lack of memory."""
LOCKS, USERS = b"l", b"u"
"""After READY: the supervisor is asked about locks; each run has its own user."""
SESSIONS = "spear_sandbox.guest.interpreter"
"""Loaded in an interpreter that sessions are forked from."""
_MOST_DESCRIPTORS = 8


class _Origin(NamedTuple):
    """What every run has in common."""

    load_filter: Callable[[], int]
    asks: bool
    """Whether the filter asks the supervisor about locks."""
    baseline: int
    """Bytes of address space of this interpreter."""
    uid: int
    gid: int
    interpreter: ModuleType | None
    """The module that runs the cells of sessions."""
    fork: Callable[[], int]


def serve(control: socket.socket, modules: list[str], users: range) -> Callable[[], None]:  # noqa: PLR0915
    """Import ``modules``, report readiness, and fork at each request until the pool hangs up.

    ``users`` are user ids, one for each run; if empty, all runs have this process's.

    A request is ``SPAWN`` with the descriptors of the job, stdout, stderr, the report, control groups and, perhaps, a
    session's orders and stdin; the answer is ``SPAWNED`` with a pidfd. Returns in the forked processes only: with what
    runs the program.
    """
    warmth.warm_up(modules)
    interpreter = sys.modules.get(SESSIONS)
    if interpreter is not None:
        interpreter.warm_up()
    assert threading.active_count() == 1, "a thread is running: its locks would be copied as they are"
    asks = can_listen()
    load = prepare_filter(build_filter(locks=Locks.ASK if asks else Locks.RECORDS), listen=asks)
    # Unknown modules may have registered hooks for forked processes.
    fork = kernel.fork if all(name.partition(".")[0] in warmth.KNOWN for name in modules) else os.fork
    # Now: in a new user namespace there are no ids before the maps are written.
    user, group, size = os.getuid(), os.getgid(), program.measure_address_space()
    origin = _Origin(load, asks, size, user, group, interpreter, fork)
    kernel.keep_for_ever(origin)
    _make_streams()
    if users and not let_others_read(users.start):
        users = range(0)
    next_user = itertools.cycle(users)
    # By default each thread that allocates reserves 64 MiB and more of the address space.
    kernel.share_arenas(2)
    rehearse(WORKING_FOLDER)
    program.hide_own_modules()
    gc.collect()
    gc.disable()
    gc.freeze()
    kernel.gather_memory()
    # The kernel counts descriptors in flight by user, including those of programs, against this limit.
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    # Ended runs need not be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.sendall(READY + (LOCKS if asks else b"") + (USERS if users else b""))
    room = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
    while True:
        message, ancillary, _, _ = control.recvmsg(16, room)
        if not message:
            os._exit(0)
        received = array.array("i")
        for _, _, data in ancillary:
            received.frombytes(data)
        gate = -1
        try:
            gate = os.eventfd(0) if users else -1
            child, pidfd = kernel.clone(kernel.ALL_NAMESPACES)
        except OSError as error:
            control.sendall((STARVED if error.errno == errno.ENOMEM else FAILED) + str(error).encode())
        else:
            if child == 0:
                return _start_run(received, origin, gate)
            if users:
                with contextlib.suppress(OSError):  # it was killed, or the run reports that it has no user
                    kernel.write_file(f"/proc/{child}/uid_map", f"{origin.uid} {next(next_user)} 1")
                os.eventfd_write(gate, 1)
            try:
                socket.send_fds(control, [SPAWNED], [pidfd])
            except OSError as error:  # too many descriptors of this user are under way
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                control.sendall(FAILED + str(error).encode())
            os.close(pidfd)
        for fd in (*received, *([gate] if gate >= 0 else [])):
            os.close(fd)


def _make_streams() -> None:
    """Make the streams of every program: its output goes into pipes, its input is a file or nothing."""
    null = os.dup(1)
    ends = os.pipe()
    for fd in (1, 2):
        os.dup2(ends[1], fd)
    program.make_streams()
    for fd in (1, 2):
        os.dup2(null, fd)
    for fd in (*ends, null):
        os.close(fd)


def _start_run(received: array.array[int], origin: _Origin, gate: int) -> Callable[[], None]:
    """Close the new namespaces off as their process 1, fork the program and supervise it.

    ``gate`` is an eventfd that tells when this process has its own user; -1 if it will not have one.
    """
    job_fd, out, error, report_fd, *others = received
    report_here = report_fd
    try:
        supervisor.reset_signals()
        job = read_job(job_fd)
        kernel.die_first(supervisor.OOM_SCORE)
        # A signal to a process group reaches all of it, whatever its namespaces: other runs, and the warm interpreter.
        # Not a session: under autogroup each would get as much CPU as the pool, however nice it is.
        os.setpgid(0, 0)
        # As the pool's user, who owns the groups.
        others = supervisor.enter_groups(job, others)
        if gate >= 0:
            os.read(gate, 8)
            kernel.map_group(origin.gid)
            os.setresuid(origin.uid, origin.uid, origin.uid)  # outside it is another user
        else:
            kernel.map_ids(origin.uid, origin.gid)
        kernel.die_with_parent()  # after a change of the user, which undoes it
        with contextlib.suppress(OSError):
            kernel.write_file("/proc/sys/user/max_user_namespaces", "0")
        size = f"size={job['disk_mb']}m,nr_inodes={job['inodes']},mode=1777"
        kernel.mount("tmpfs", WORKING_FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        os.chdir(WORKING_FOLDER)
        hidden = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
        kernel.mount("proc", "/proc", "proc", hidden)
        report_here = supervisor.place_descriptors(job, out, error, report_fd, others)
        resource.setrlimit(resource.RLIMIT_NPROC, (job["processes"], job["processes"]))
        kernel.drop_capabilities()
        kernel.deny_new_privileges()
        # A program that could open the supervisor's descriptors could write its own report.
        kernel.clear_dumpable()
        listener = origin.load_filter()
        keeper = LockKeeper(listener, WORKING_FOLDER) if origin.asks else None
        child = origin.fork()
        if child == 0:
            kernel.set_dumpable()
            program.write_files(job, WORKING_FOLDER)
            program.set_limits(job, origin.baseline)
            start = program.hand_over(job, WORKING_FOLDER)
            if not job["session"]:
                return start
            assert origin.interpreter is not None
            return origin.interpreter.serve
        _supervise(child, job, keeper)
    except BaseException as failure:
        supervisor.report_failure(failure, report_here)
        os._exit(1)


def _supervise(child: int, job: Job, keeper: LockKeeper | None) -> NoReturn:
    for fd in (0, 1, 2):
        os.close(fd)
    own = str(os.getpid())

    def processes() -> Iterator[str]:
        return (name for name in os.listdir("/proc") if name.isdigit() and name != own)

    def kill() -> None:
        kernel.kill_all(signal.SIGKILL)

    control = supervisor.CONTROL_FD if job["session"] else None
    held = supervisor.hold_in_sockets
    record = supervisor.supervise(
        child, job, WORKING_FOLDER, processes, kill, elsewhere=held, keeper=keeper, control=control
    )
    supervisor.report(record)
    os._exit(0)
