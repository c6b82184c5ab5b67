"""Names of things: ``Apple_bar__plus_01_dot_23_…`` is ``apple 1``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

_MARKS = (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ","))
"""Spelling of signs in an id without ``_bar_``."""


def name_things(ids: Iterable[str]) -> dict[str, str]:
    """Name the ids that occur in a game's facts, all in lower case, as alfworld's ``Demangler`` does.

    The base name is what precedes the first ``_bar_``, plus ``basin`` if the id contains it. Ids are sorted, and the
    numbers of one base name are assigned from the highest down. An id without ``_bar_`` keeps its text and gets a
    trailing blank instead of a number.
    """
    ordered = sorted(set(ids))
    bases = {one: _find_base(one) for one in ordered}
    left = Counter(base for base in bases.values() if base is not None)
    names: dict[str, str] = {}
    for one, base in bases.items():
        if base is None:
            text = one
            for mark, sign in _MARKS:
                text = text.replace(mark, sign)
            names[one] = f"{text} "
        else:
            names[one] = sys.intern(f"{base} {left[base]}")
            left[base] -= 1
    return names


def _find_base(one: str) -> str | None:
    head, found, _ = one.partition("_bar_")
    if not found:
        return None
    return f"{head}basin" if "basin" in one else head
