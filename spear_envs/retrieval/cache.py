"""Hits of past queries, within a number of bytes."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spear_envs.retrieval.backend import Found


ENTRY_BYTES = 320
"""Approximate size of an entry without query and hits: key, links, tuple, two array headers."""


class _Packed(NamedTuple):
    passages: array[int] | tuple[bytes, ...]
    """Rows, or the documents of a backend whose passages are documents."""
    scores: array[float]
    size: int


class HitCache:
    """A cache of hits of one backend that drops the least recently used.

    Args:
        max_bytes: approximate size of all entries; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[tuple[str, int], _Packed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, query: str, depth: int) -> list[Found] | None:
        """Return the hits of a query at a depth, if they are cached."""
        packed = self._entries.get((query, depth))
        if packed is None:
            return None
        self._entries.move_to_end((query, depth))
        return list(zip(packed.passages, packed.scores, strict=True))

    def put(self, query: str, depth: int, hits: Sequence[Found]) -> None:
        """Cache hits, and drop the oldest ones to make room."""
        if not self.max_bytes:
            return
        old = self._entries.pop((query, depth), None)
        if old is not None:
            self.used_bytes -= old.size
        documents = tuple(passage for passage, _ in hits if isinstance(passage, bytes))
        size = ENTRY_BYTES + sys.getsizeof(query) + 16 * len(hits) + sum(map(sys.getsizeof, documents))
        if size > self.max_bytes:
            return
        rows = array("q", [passage for passage, _ in hits if isinstance(passage, int)])
        scores = array("d", [score for _, score in hits])
        self._entries[query, depth] = _Packed(documents or rows, scores, size)
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            _, packed = self._entries.popitem(last=False)
            self.used_bytes -= packed.size
