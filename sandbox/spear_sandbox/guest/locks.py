"""Locks on files: a program may lock its own, but not those that all runs share, where others would see it.

The filter of system calls leaves locks open; the kernel asks the supervisor, which examines the file. The file cannot
change before it is locked: the caller has one thread, and processes cannot share tables of descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from spear_sandbox.guest import kernel
from spear_sandbox.guest.seccomp import build_filter, load_filter

_RECEIVE, _SEND, _IS_VALID = 0xC050_2100, 0xC018_2101, 0x4008_2102
_QUESTION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_CONTINUE = 1


class LockKeeper:
    """Answers the kernel's questions about locks on ``listener``; the working folder has its own file system."""

    def __init__(self, listener: int, folder: str) -> None:
        self.listener = listener
        self._device = os.stat(folder).st_dev

    def answer(self) -> None:
        """Answer the next question."""
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, question)
        except OSError:  # the caller is gone
            return
        number, thread, _, _, _, _, descriptor, *_ = _QUESTION.unpack(question)
        refusal = self._judge(thread, descriptor & 0xFFFF_FFFF)
        with contextlib.suppress(OSError):
            # After the check: the process id may have been reused in the meantime.
            fcntl.ioctl(self.listener, _IS_VALID, struct.pack("=Q", number))
            answer = (number, 0, -refusal, 0) if refusal else (number, 0, 0, _CONTINUE)
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(*answer))

    def _judge(self, thread: int, descriptor: int) -> int:
        """Return 0 to allow the lock, or the errno of its refusal."""
        try:
            found = os.stat(f"/proc/{thread}/fd/{descriptor}")
        except FileNotFoundError:
            return errno.EBADF
        except OSError:  # it is not dumpable
            return errno.EPERM
        if found.st_dev != self._device:
            return errno.EPERM
        with contextlib.suppress(OSError):
            if len(os.listdir(f"/proc/{thread}/task")) == 1:
                return 0
        return errno.ENOLCK


def can_listen() -> bool:
    """Return whether the kernel can ask: since Linux 5.5, unless an outer process already listens."""
    child = os.fork()
    if child == 0:
        ended = 1
        with contextlib.suppress(OSError):
            kernel.deny_new_privileges()
            load_filter(build_filter(), listen=True)
            ended = 0
        os._exit(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
