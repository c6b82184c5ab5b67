"""The process of :mod:`spear_envs.code.verifying`: JSON ``[gold, answer, seconds]`` in, ``true`` or ``false`` out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys

MEMORY = 4 << 30
"""Bytes of address space, since an answer may need more than there is."""


def main() -> None:
    """Answer questions until stdin ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of the libraries must not mix with replies
    from spear_envs.code.equality import is_equal

    logging.disable()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    replies.write(b"ready\n")
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        try:
            right = is_equal(gold, answer)
        except Exception:  # an answer that crashes the libraries is not the gold one
            right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(b"true\n" if right is True else b"false\n")


if __name__ == "__main__":
    main()
