"""A user id for each run: the kernel counts descriptors in flight and sizes of pipes by user."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from spear_sandbox.guest import kernel

_OF_ONE = 4096
"""Users of one warm interpreter, which is replaced long before it runs out."""
_BLOCKS = 1 << 15
_END = 1 << 31
"""The blocks before it are above the ids of containers and those of directories (SSSD, by default)."""


def choose_users() -> range:
    """Choose numbers that this process may give to runs, unlike other interpreters'; empty if it may not.

    For root these are the last ones of this user namespace, else some of those that /etc/subuid grants.
    """
    first, count = max(_list_mapped() if os.getuid() == 0 else _list_granted(), key=lambda span: span[1])
    end = min(first + count, _END)
    blocks = min((end - first) // (2 if os.getuid() == 0 else 1) // _OF_ONE, _BLOCKS)
    if blocks == 0:
        return range(0)
    # Live interpreters have different process ids, and so mostly different blocks.
    start = end - _OF_ONE * (1 + os.getpid() % blocks)
    return range(start, start + _OF_ONE)


def _list_mapped() -> list[tuple[int, int]]:
    """Return the first number and length of the spans of this user namespace."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return [(int(first), int(count)) for first, _, count in map(str.split, file)]


def _list_granted() -> list[tuple[int, int]]:
    """Return the same for what a user who is not root may use through newuidmap."""
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
    """Start a process that stays outside of the namespaces that this one is about to enter.

    Returns a function to be called inside, which maps these users and ``uid``, this process's by then, and returns
    whether that worked. Only the group is then left to map.
    """
    # Only a process outside, with the privilege there, may map more than one id.
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
        except OSError:  # root of a container may not
            return False
        return True
    import subprocess

    numbers = [str(number) for line in lines for number in line]
    command = ["newuidmap", str(process), *numbers]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:  # it is not installed
        return False
    return done.returncode == 0


def let_others_read(user: int) -> bool:
    """Return whether this user can read the loaded modules: packages in a home folder may be private."""
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
