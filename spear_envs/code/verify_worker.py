"""The process of :mod:`spear_envs.code.verifying`: a JSON line ``[gold, answer]`` in, ``true`` or ``false`` out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import sys

from spear_envs.code.grading import is_same_integer

MEMORY = 4 << 30
"""Bytes of address space, since an answer may need more than there is."""


def main() -> None:
    """Answer questions until stdin ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of the libraries must not mix with replies
    from math_verify import parse, verify
    from sympy import Basic, E, Eq, I, Set, simplify
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    logging.disable()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def read(text: str) -> list[object]:
        text = re.sub(r"√\s*(\d+|\w)", r"\\sqrt{\1}", text).replace("\\varnothing", "\\emptyset")
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)

    def is_named(relation: Relational) -> bool:
        """Return whether it has a free variable, which a function, ``e`` and ``i`` on the left may also be."""
        return bool(relation.free_symbols or relation.atoms(AppliedUndef) or relation.lhs in (E, I))

    def is_claim(found: list[object]) -> bool:
        """Return whether it states a relation without a free variable: math-verify reads ``20=19`` as 19.

        A chain that begins with a name, as ``x=6*7=42``, may state true ones.
        """
        relations = found[0].atoms(Relational) if found and isinstance(found[0], Basic) else set()
        stated = [each for each in relations if not is_named(each)]
        true = all(isinstance(each, Eq) and simplify(each.lhs.doit() - each.rhs.doit()) == 0 for each in stated)
        return bool(stated) and (len(stated) == len(relations) or not true)

    def is_range(wanted: list[object]) -> bool:
        """Return whether an inequality may be the same set: math-verify takes ``1<x<2`` for the numbers 1 and 2."""
        return bool(wanted) and isinstance(wanted[0], Set) and not wanted[0].is_FiniteSet

    replies.write(b"ready\n")
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            right = not re.search("=|equiv|mod", gold) and is_same_integer(answer, gold)
            if not right:
                wanted, found = read(gold), read(answer)
                right = (is_claim(wanted) or not is_claim(found)) and verify(
                    wanted, found, allow_set_relation_comp=is_range(wanted), timeout_seconds=None
                )
        except Exception:  # an answer that crashes the libraries is not the gold one
            right = False
        replies.write(b"true\n" if right is True else b"false\n")


if __name__ == "__main__":
    main()
