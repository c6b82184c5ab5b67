"""Users of the kernel for runs, one each: it counts descriptors under way and sizes of pipes by user."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from spear_sandbox.guest import kernel

_OF_ONE = 4096
"""Users of one warm interpreter, which is replaced long before they come round again."""
_BLOCKS = 1 << 15
_END = 1 << 31
"""The blocks before it lie above the ids of containers, and those that directories (SSSD, by default) give out."""


def choose_users() -> range:
    """Numbers that this process may give to runs, of which other interpreters have others; empty where there are none.

    As root they are the last ones that this user namespace has, else some of those that /etc/subuid grants.
    """
    first, count = max(_list_mapped() if os.getuid() == 0 else _list_granted(), key=lambda span: span[1])
    end = min(first + count, _END)
    blocks = min((end - first) // (2 if os.getuid() == 0 else 1) // _OF_ONE, _BLOCKS)
    if blocks == 0:
        return range(0)
    start = end - _OF_ONE * (1 + os.getpid() % blocks)
    return range(start, start + _OF_ONE)


def _list_mapped() -> list[tuple[int, int]]:
    """First number and length of the spans that this user namespace has."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return [(int(first), int(count)) for first, _, count in map(str.split, file)]


def _list_granted() -> list[tuple[int, int]]:
    """The same of those that a user who is not root may use with the help of newuidmap."""
    import pwd

    names, granted = {str(os.getuid())}, [(0, 0)]
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    with contextlib.suppress(OSError, ValueError), open("/etc/subuid", encoding="utf-8") as file:
        for line in file:
            name, *numbers = line.strip().split(":")
            if name in names and len(numbers) == 2:
                granted.append((int(numbers[0]), int(numbers[1])))
    return granted


def prepare_map(uid: int, users: range) -> Callable[[], bool]:
    """Start a process that stays outside of the namespaces that this one is about to leave for.

    Args:
        uid: This process's own user by then, which is mapped as well.

    Returns:
        To be called inside: has these users mapped there; whether that worked. Then only the group is left to map.
    """
    ours, theirs = socket.socketpair()
    helper = os.fork()
    if helper == 0:
        ours.close()
        try:
            if theirs.recv(1) and _write_map(os.getppid(), uid, users):
                theirs.send(b"y")
        finally:
            os._exit(0)
    theirs.close()

    def write() -> bool:
        with ours:
            ours.send(b"m")
            written = ours.recv(1) == b"y"
        with contextlib.suppress(ChildProcessError):
            os.waitpid(helper, 0)
        return written

    return write


def _write_map(process: int, uid: int, users: range) -> bool:
    lines = ((uid, uid, 1), (users.start, users.start, len(users)))
    if os.getuid() == 0:
        try:
            kernel.write_file(f"/proc/{process}/uid_map", "".join(f"{a} {b} {c}\n" for a, b, c in lines))
        except OSError:  # root of a container has no right to
            return False
        return True
    import subprocess

    numbers = [str(number) for line in lines for number in line]
    try:
        done = subprocess.run(
            ["newuidmap", str(process), *numbers], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:  # it is not installed
        return False
    return done.returncode == 0


def let_others_read(user: int) -> bool:
    """Whether this user can read what is loaded: a home folder may keep packages to its owner."""
    child = os.fork()
    if child == 0:
        refused = 1
        with contextlib.suppress(OSError):
            os.setresuid(user, user, user)
            files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
            readable = all(os.access(path, os.R_OK) for path in files if path)
            refused = not (readable and os.access(sys.executable, os.X_OK))
        os._exit(refused)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
