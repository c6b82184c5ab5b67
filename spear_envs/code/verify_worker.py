"""The process behind :mod:`spear_envs.code.verifying`: a JSON line ``[gold, answer]`` in, ``true`` or ``false`` out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys

MEMORY = 4 << 30
"""Bytes of address space: an answer may ask for more than there is."""


def main() -> None:
    """Answer questions until stdin ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the libraries say must not get among the replies
    from math_verify import parse, verify

    logging.disable()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def read(text: str) -> list[object]:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)

    replies.write(b"ready\n")
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            right = verify(read(gold), read(answer), timeout_seconds=None)
        except Exception:  # whatever an answer makes the libraries stumble over, it is not the gold one
            right = False
        replies.write(b"true\n" if right is True else b"false\n")


if __name__ == "__main__":
    main()
