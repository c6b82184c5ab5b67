"""Locks on files: a program may lock its own, and not those that all runs share, where others would see it.

The filter of system calls leaves locks open; the kernel asks the supervisor, which looks at the file. What it has seen
is what will be locked, since nobody else has the caller's descriptors: it has one thread, and tables of descriptors
cannot be shared between processes.
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
    """Answers the kernel.

    Args:
        listener: That the filter was loaded with.
        folder: The run's own; its file system is nobody else's.
    """

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
            # After the look: a number of a process may have been given to another one in the meantime.
            fcntl.ioctl(self.listener, _IS_VALID, struct.pack("=Q", number))
            answer = (number, 0, -refusal, 0) if refusal else (number, 0, 0, _CONTINUE)
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(*answer))

    def _judge(self, thread: int, descriptor: int) -> int:
        """0, or the number of an error."""
        try:
            found = os.stat(f"/proc/{thread}/fd/{descriptor}")
        except FileNotFoundError:
            return errno.EBADF
        except OSError:  # it does not let itself be looked into
            return errno.EPERM
        if found.st_dev != self._device:
            return errno.EPERM
        return 0 if _is_alone(thread) else errno.ENOLCK


def _is_alone(thread: int) -> bool:
    """Whether it is the only thread of its process."""
    try:
        return len(os.listdir(f"/proc/{thread}/task")) == 1
    except OSError:
        return False


def can_listen() -> bool:
    """Whether the kernel asks: since Linux 5.5, where nobody around this process is asked already."""
    child = os.fork()
    if child == 0:
        ended = 1
        with contextlib.suppress(OSError):
            kernel.deny_new_privileges()
            load_filter(build_filter(), listen=True)
            ended = 0
        os._exit(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
