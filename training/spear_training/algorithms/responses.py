"""What Dr.BoT's filters look for in single responses (``sec:botdetails``), without torch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

UNREADABLE = ("\ufffd", "\u00ef\u00bf\u00bd", "\u00ef\u00bc\u0178")
"""Text that bytes which are not UTF-8 decode to: the replacement character, the same read as Windows-1252, and a
full-width question mark read so. The authors' code has these and combinations of them."""


def is_unreadable(text: str) -> bool:
    """Return whether a response has characters that come from broken bytes (:data:`UNREADABLE`)."""
    return any(mark in text for mark in UNREADABLE)


def is_incomplete(text: str) -> bool:
    """Return whether a response lacks a whole ``<action>`` after its last ``</think>``, as the authors' code asks."""
    return "</action>" not in text.rpartition("</think>")[2].partition("<action>")[2]


def has_repetition(token_ids: npt.ArrayLike, *, ngram: int = 20, times: int = 10) -> bool:
    """Return whether a sequence of ``ngram`` token ids occurs at least ``times`` times; occurrences may overlap."""
    if ngram < 1 or times < 1:
        raise ValueError(f"ngram and times must be 1 or more, not {ngram} and {times}")
    ids = np.asarray(token_ids, dtype=np.int64)
    windows = ids.size - ngram + 1
    if windows < times:
        return False
    # A polynomial hash of every window modulo 2^64; windows with frequent hashes are then compared in full.
    tokens = ids.view(np.uint64)
    hashes = np.zeros(windows, np.uint64)
    for shift in range(ngram):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[shift : shift + windows]
    ordered = np.sort(hashes)
    # In sorted order, a hash that occurs ``times`` times equals the one ``times - 1`` places before it.
    repeated = ordered[times - 1 :][ordered[times - 1 :] == ordered[: windows - times + 1]]
    if not repeated.size:
        return False
    starts = np.flatnonzero(np.isin(hashes, repeated)).tolist()
    counts = Counter(ids[start : start + ngram].tobytes() for start in starts)
    return max(counts.values()) >= times
