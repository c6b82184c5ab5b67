"""The filter of system calls: a list of allowed ones, as a classic BPF program assembled here."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from spear_sandbox.guest.kernel import ALL_NAMESPACES, MACHINE, NEW_CONTROL_GROUPS
from spear_sandbox.guest.syscalls import ALLOWED, EXAMINED, NEWEST

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF_0000, 0x8000_0000, 0x0005_0000, 0x7FC0_0000
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SHARED_ANONYMOUS = 0x01 | 0x20
_AF_UNIX = 1
# Of a terminal, a pipe or a descriptor: TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
# For the supervisor: SECCOMP_IOCTL_NOTIF_RECV, _SEND and _ID_VALID, on a descriptor that programs cannot get.
_IOCTLS = (0xC050_2100, 0xC018_2101, 0x4008_2102, 0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Of fcntl: duplicates and flags of descriptors. Not sizes of pipes, leases, notices and hints on files, nor locks of
# open files, which /proc/locks shows to everybody.
_PLAIN_COMMANDS = (0, 1, 2, 3, 4, 1030)
_LOCK_COMMANDS = (5, 6, 7)
_OWNER_COMMANDS = (8, 9, 10, 11, 15, 16)  # whom signals go to
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x1_0000
_S_IFMT, _S_IFIFO, _S_IFREG = 0xF000, 0x1000, 0x8000
_UNPRIVILEGED_KINDS = (_S_IFIFO, _S_IFREG, 0)  # pipes and plain files; 0 is also a plain file
_MSG_OOB = 1
_FLAGS_AT = {"recvfrom": 3, "recvmmsg": 3, "recvmsg": 2, "sendmmsg": 3, "sendmsg": 2, "sendto": 3}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_PRIO_PROCESS = 0
_SUPERVISOR = 1
_SOCK_TYPE_MASK, _SOCK_STREAM = 0xF, 1
# Calls that act on processes by number: without a pid namespace those may be anybody's.
_ON_OTHERS = (
    "kill",
    "pidfd_open",
    "pidfd_send_signal",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "setpgid",
    "setsid",
    "tkill",
)
_PAST_LANDLOCK = ("truncate",)
"""Calls that change the contents of a file by its name; before Linux 6.2 Landlock does not see them."""


class Locks(Enum):
    """What a filter does with locks on files. Runs share the files of the system."""

    ASK = "ask"
    """The supervisor decides."""
    RECORDS = "records"
    """Those of ``fcntl``, which SQLite needs, are allowed, also on shared files."""
    ALLOW = "allow"
    """All are allowed."""


class _Step(NamedTuple):
    code: int
    if_true: int
    if_false: int
    value: int


Program = list[_Step]


def _end(action: int) -> Program:
    return [_Step(_RETURN, 0, 0, action)]


def _refuse(number: int) -> Program:
    return _end(_ERRNO | number)


def _load_argument(index: int) -> _Step:
    return _Step(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _one_of(index: int, values: Sequence[int], then: int, otherwise: int, mask: int | None = None) -> Program:
    """Return ``then`` if the argument, or what ``mask`` leaves of it, has one of the values."""
    masked = [] if mask is None else [_Step(_AND, 0, 0, mask)]
    # A hit jumps over the tests that are left and over the return of ``otherwise``.
    tests = [_Step(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [_load_argument(index), *masked, *tests, *_end(otherwise), *_end(then)]


def _any_of(index: int, bits: int, then: int, otherwise: int) -> Program:
    """Return ``then`` if the argument has one of the bits."""
    return [_load_argument(index), _Step(_ANY_BIT, 1, 0, bits), *_end(otherwise), *_end(then)]


def _unless(index: int, value: int, otherwise: int) -> Program:
    """Continue if the argument has this value, else return ``otherwise``."""
    return [_load_argument(index), _Step(_EQUAL, 1, 0, value), *_end(otherwise)]


def _no_namespaces_nor_shared_tables(denied: int) -> Program:
    """Restrict clone: processes that share descriptors without being threads of one could deceive the supervisor."""
    return [
        _load_argument(0),
        _Step(_ANY_BIT, 4, 0, ALL_NAMESPACES | NEW_CONTROL_GROUPS),
        _Step(_AND, 0, 0, _CLONE_FILES | _CLONE_THREAD),
        _Step(_EQUAL, 2, 0, _CLONE_FILES),
        *_end(_ALLOW),
        *_end(denied),
        *_end(denied),
    ]


def _fcntl(commands: Sequence[int], locks: int, otherwise: int) -> Program:
    """Allow these commands; return ``locks`` for those that lock records."""
    every = (*_LOCK_COMMANDS, *commands)
    tests = [_Step(_EQUAL, len(every) - at + (value in _LOCK_COMMANDS), 0, value) for at, value in enumerate(every)]
    return [_load_argument(1), *tests, *_end(otherwise), *_end(_ALLOW), *_end(locks)]


def _examine(own_process: int | None, locks: Locks, stacked: bool) -> dict[str, Program]:
    """Return the rules for the calls that are decided by their arguments."""
    denied = _ERRNO | errno.EPERM
    lock = {Locks.ASK: _ASK, Locks.RECORDS: denied, Locks.ALLOW: _ALLOW}[locks]
    owners = () if own_process is not None else _OWNER_COMMANDS
    out_of_band = {
        name: _any_of(index, _MSG_OOB, _ERRNO | errno.EOPNOTSUPP, _ALLOW) for name, index in _FLAGS_AT.items()
    }
    rules = out_of_band | {
        "clone": _no_namespaces_nor_shared_tables(denied),
        # Its arguments are in memory, which a filter cannot read. The C library falls back to clone.
        "clone3": _refuse(errno.ENOSYS),
        "fcntl": _fcntl((*_PLAIN_COMMANDS, *owners), _ASK if locks is Locks.ASK else _ALLOW, denied),
        "flock": _end(lock),
        "ioctl": _one_of(1, _IOCTLS, _ALLOW, _ERRNO | errno.ENOTTY),
        "mknod": _one_of(1, _UNPRIVILEGED_KINDS, _ALLOW, denied, mask=_S_IFMT),
        "mknodat": _one_of(2, _UNPRIVILEGED_KINDS, _ALLOW, denied, mask=_S_IFMT),
        # Pages of a shared anonymous mapping outlive the process that filled them, and no process then shows them.
        "mmap": _one_of(3, (_SHARED_ANONYMOUS,), denied, _ALLOW, mask=_SHARED_ANONYMOUS),
        # The supervisor belongs to the same user. A program that lowered its limits could end the run without a report.
        "prlimit64": _one_of(0, (_SUPERVISOR,), denied, _ALLOW),
        "sched_setaffinity": _one_of(0, (_SUPERVISOR,), denied, _ALLOW),
        "setpriority": [*_unless(0, _PRIO_PROCESS, denied), *_one_of(1, (_SUPERVISOR,), denied, _ALLOW)],
        "seccomp": _end(_ALLOW if stacked else denied),
        "socket": _end(denied),
        "socketpair": _one_of(0, (_AF_UNIX,), _ALLOW, denied),
        "tgkill": _end(_ALLOW),
    }
    if own_process is not None:
        rules["sched_setaffinity"] = rules["setpriority"] = _end(denied)
        # Pairs of stream sockets: from one of datagrams, messages could be sent to any address of this machine.
        streams = _one_of(1, (_SOCK_STREAM,), _ALLOW, denied, mask=_SOCK_TYPE_MASK)
        rules["socketpair"] = [*_unless(0, _AF_UNIX, denied), *streams]
        rules["prlimit64"] = _one_of(0, (0, own_process), _ALLOW, denied)
        rules["tgkill"] = _one_of(0, (own_process,), _ALLOW, denied)
    return rules


def _search(parts: list[tuple[int, Program]]) -> Program:
    """Find the part of the number by binary search; ``parts`` are pairs of first number and what to do."""
    if len(parts) == 1:
        return parts[0][1]
    half = len(parts) // 2
    lower, upper = _search(parts[:half]), _search(parts[half:])
    # A conditional jump reaches 255 steps; a longer program would need two.
    assert len(lower) <= 255, "the list of system calls has outgrown one jump"
    return [_Step(_AT_LEAST, len(lower), 0, parts[half][0]), *lower, *upper]


def build_filter(*, own_process: int | None = None, locks: Locks = Locks.ASK, stacked: bool = False) -> bytes:
    """Build a program that allows the listed calls; others get EPERM, and those newer than the list ENOSYS.

    Without a pid namespace, the process ``own_process``, which will load the filter, may signal itself only; None
    allows signals to all that can be seen. With ``Locks.ASK`` it must be loaded with a listener. ``stacked``: a process
    under this filter will load another. Raises OSError unless this machine is x86_64 or aarch64.
    """
    if MACHINE not in _ARCHITECTURE:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {MACHINE}: only for x86_64 and aarch64")
    column = list(_ARCHITECTURE).index(MACHINE)
    denied, allowed = _refuse(errno.EPERM), _end(_ALLOW)
    refused = (*_ON_OTHERS, *_PAST_LANDLOCK) if own_process is not None else ()
    by_number = {numbers[column]: allowed for name, numbers in ALLOWED.items() if name not in refused}
    by_number |= {EXAMINED[name][column]: rule for name, rule in _examine(own_process, locks, stacked).items()}
    by_number.pop(None, None)
    parts: list[tuple[int, Program]] = []
    for number in range(NEWEST + 1):
        what = by_number.get(number, denied)
        if not parts or parts[-1][1] != what:
            parts.append((number, what))
    # Above: newer calls, and on x86_64 those of the x32 interface.
    parts.append((NEWEST + 1, _refuse(errno.ENOSYS)))
    program = [
        _Step(_LOAD, 0, 0, _ARCHITECTURE_AT),
        _Step(_EQUAL, 1, 0, _ARCHITECTURE[MACHINE]),
        *_end(_KILL),
        _Step(_LOAD, 0, 0, _NUMBER_AT),
        *_search(parts),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def load_filter(program: bytes, *, listen: bool = False) -> int:
    """Put this process and its future children under the filter, for good. Needs ``no_new_privs``.

    With ``listen``, return a descriptor on which the kernel asks about calls that the filter leaves open. Raises
    OSError if the kernel refuses, or an outer process already listens.
    """
    return prepare_filter(program, listen=listen)()


def prepare_filter(program: bytes, *, listen: bool) -> Callable[[], int]:
    """Prepare :func:`load_filter`, so that the returned call has little left to do."""
    steps = ctypes.create_string_buffer(program, len(program))
    handle = _Program(len(program) // 8, ctypes.addressof(steps))
    libc = ctypes.PyDLL(None, use_errno=True)
    number = EXAMINED["seccomp"][list(_ARCHITECTURE).index(MACHINE)] or 0
    arguments = tuple(map(ctypes.c_long, (number, _SET_MODE_FILTER, _NEW_LISTENER if listen else 0)))
    call, at = libc.syscall, ctypes.byref(handle)

    def load() -> int:
        result = call(*arguments, at)
        if result < 0:
            failed = ctypes.get_errno()
            raise OSError(failed, f"seccomp: {os.strerror(failed)}")
        assert steps
        return int(result)

    return load
