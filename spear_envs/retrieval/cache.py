"""Hits of past queries, as many as a number of bytes holds."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spear_envs.retrieval.backend import Found


ENTRY_BYTES = 320
"""About what an entry takes beside its query and its hits: key, links, tuple, two array headers."""


class _Packed(NamedTuple):
    passages: array[int] | tuple[bytes, ...]
    """Rows, or the documents of a backend whose passages are documents."""
    scores: array[float]
    size: int


class HitCache:
    """Least recently used entries go first. One cache belongs to one backend, so its fingerprint is in no key.

    Args:
        max_bytes: what all entries together may take, about; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[tuple[str, int], _Packed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, query: str, depth: int) -> list[Found] | None:
        """The hits that were put in for a query at a depth; None if they are not here."""
        packed = self._entries.get((query, depth))
        if packed is None:
            return None
        self._entries.move_to_end((query, depth))
        return list(zip(packed.passages, packed.scores, strict=True))

    def put(self, query: str, depth: int, hits: Sequence[Found]) -> None:
        """Keep hits, and let go of the oldest ones while there is too little room."""
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
