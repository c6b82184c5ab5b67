"""The process of :mod:`spear_envs.code.verifying`: a JSON line ``[gold, answer]`` in, ``true`` or ``false`` out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys

MEMORY = 4 << 30
"""Bytes of address space, since an answer may need more than there is."""


def main() -> None:
    """Answer questions until stdin ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of the libraries must not mix with replies
    from math_verify import parse, verify
    from sympy import Basic, Eq, Symbol
    from sympy.core.relational import Relational

    logging.disable()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def read(text: str) -> list[object]:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)

    def is_claim(found: list[object]) -> bool:
        """Whether it is more than a value or ``name = value``: math-verify reads ``20=19`` as 19."""
        relations = found[0].atoms(Relational) if found and isinstance(found[0], Basic) else set()
        return any(not (isinstance(each, Eq) and isinstance(each.lhs, Symbol)) for each in relations)

    replies.write(b"ready\n")
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            wanted, found = read(gold), read(answer)
            right = is_claim(found) == is_claim(wanted) and verify(wanted, found, timeout_seconds=None)
        except Exception:  # an answer that crashes the libraries is not the gold one
            right = False
        replies.write(b"true\n" if right is True else b"false\n")


if __name__ == "__main__":
    main()
