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
    heads = {one: one.partition("_bar_")[0] for one in ordered if "_bar_" in one}
    bases = {one: f"{head}basin" if "basin" in one else head for one, head in heads.items()}
    left = Counter(bases.values())
    names: dict[str, str] = {}
    for one in ordered:
        if one in bases:
            names[one] = sys.intern(f"{bases[one]} {left[bases[one]]}")
            left[bases[one]] -= 1
        else:
            text = one
            for mark, sign in _MARKS:
                text = text.replace(mark, sign)
            names[one] = f"{text} "
    return names
