"""Searching: from a query to the numbers of the best documents, in Lucene's order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.analysis import analyze
from spear_envs.bm25.files import MEND, map_index
from spear_envs.bm25.packing import BLOCK, Packed, count_words, find_factors, pack_postings, unpack_pairs
from spear_envs.bm25.postings import make_postings
from spear_envs.core.errors import SpearError

Rank = Callable[..., list[tuple[int, float]]]
"""Scores documents and chooses the best, as :func:`rank_with_numpy`."""


def rank_with_numpy(
    lasts: npt.NDArray[np.uint32],
    blocks: npt.NDArray[np.uint64],
    data: npt.NDArray[np.uint8],
    norms: npt.NDArray[np.uint8],
    maps: npt.NDArray[np.uint64],
    factors: npt.NDArray[np.float32],
    spans: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    k: int,
    /,
) -> list[tuple[int, float]]:
    """Find the numbers and scores of the ``k`` best documents, best first, equal ones in ascending order.

    Args:
        lasts, blocks, data, norms, maps: of the index.
        factors: float32 (256,), one over the length normalisation of each quantised length.
        spans: int64 (M, 4), for each term of the query its first block, its documents, its peak, and the number of its
            map, or -1.
        weights: float32 (M,), of each term, above 0.
        k: at least 1.

    Raises:
        ValueError: the arrays contradict each other, or have impossible document numbers.
    """
    # Lucene adds each term's float32 score in double and rounds the sum once, at the end.
    sums = np.zeros(len(norms))
    words = count_words(len(norms))
    for (start, frequency, _peak, number), weight in zip(spans.tolist(), weights, strict=True):
        end = start + -(-frequency // BLOCK)
        if not (0 <= start < end <= len(blocks) and len(lasts) == len(blocks) and (number + 1) * words <= len(maps)):
            raise ValueError("a term's blocks lie outside the array")
        term_map = None if number < 0 else maps[number * words : (number + 1) * words]
        numbers, counts = unpack_pairs(frequency, lasts[start:end], blocks[start:end], data, term_map)
        if numbers[-1] >= len(norms):
            raise ValueError("a document number is too large")
        # Lucene's form of weight · count / (count + norm): monotonic in the count also after rounding.
        sums[numbers] += weight - weight / (np.float32(1) + counts.astype(np.float32) * factors[norms[numbers]])
    found = np.flatnonzero(sums)
    scores = sums[found].astype(np.float32)
    if len(found) > k:
        # Ties with the k-th stay until they have been ordered by their numbers.
        kept = scores >= np.partition(scores, -k)[-k]
        found, scores = found[kept], scores[kept]
    best = np.lexsort((found, -scores))[:k]
    return list(zip(found[best].tolist(), scores[best].tolist(), strict=True))


def choose_rank() -> Rank:
    """Choose the compiled loop, or NumPy's if it was not compiled."""
    try:
        from spear_envs.bm25._ranking import rank_hits
    except ImportError:
        return rank_with_numpy
    return rank_hits


MAX_TERMS = 1_024
"""Distinct terms of a query that count; Lucene refuses queries with more."""
REMEMBERED_TERMS = 1 << 12


class SearchIndex:
    """BM25 with k1 = 0.9 and b = 0.4 over documents that are numbered from 0.

    One index can be used by several threads. Opened from a folder, its arrays are mapped: processes share them.

    Args:
        packed: the documents' terms.
        rank: scores documents; the compiled loop by default, if there is one.
        mend: the end of the error message if a search finds damage: what the user can do.
    """

    def __init__(self, packed: Packed, rank: Rank | None = None, mend: str = MEND) -> None:
        self._packed = packed
        self._mend = mend
        self._rank = choose_rank() if rank is None else rank
        self._factors = find_factors(packed.terms_total, packed.filled)
        self._find_term = lru_cache(maxsize=REMEMBERED_TERMS)(self._look_up)

    @classmethod
    def in_memory(cls, texts: Iterable[str]) -> SearchIndex:
        """Index some thousand texts; document i is the i-th text."""
        return cls(pack_postings(make_postings(texts)))

    @classmethod
    def open(cls, folder: Path, mend: str = MEND) -> SearchIndex:
        """Map an index from :func:`~spear_envs.bm25.build.build_index`.

        Args:
            mend: the end of the error message if it cannot be used, now or in a search.

        Raises:
            SpearError: there is none, it is half built, of another version, or visibly damaged.
        """
        return cls(map_index(Path(folder), mend), mend=mend)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._packed.norms)

    def search(self, query: str, k: int = 50) -> list[int]:
        """Find the ``k`` best documents with a term of the query: numbers, best first, equal ones in ascending order.

        Any text is a query; operators have no meaning. Of more than 1,024 distinct terms the first 1,024 count.

        Raises:
            SpearError: ``k`` is below 1.
        """
        return [number for number, _ in self.search_scored(query, k)]

    def search_scored(self, query: str, k: int = 50) -> list[tuple[int, float]]:
        """Search as :meth:`search` does, and return each number with its score: Lucene's float32."""
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        spans: list[tuple[int, int, int, int]] = []
        weights: list[np.float32] = []
        held = self._packed
        try:
            for term, count in islice(Counter(analyze(query)).items(), MAX_TERMS):
                span = self._find_term(term)
                if span is not None:
                    spans.append(span)
                    # ln(1 + (N − df + 0.5)/(df + 0.5)), N = documents with at least one term. In double, then float32,
                    # and times the count in float32, as Lucene boosts a repeated term.
                    idf = math.log(1 + (held.filled - span[1] + 0.5) / (span[1] + 0.5))
                    weights.append(np.float32(count) * np.float32(idf))
            if not spans:
                return []
            return self._rank(
                held.lasts,
                held.blocks,
                held.data,
                held.norms,
                held.maps,
                self._factors,
                np.array(spans, np.int64),
                np.array(weights, np.float32),
                k,
            )
        except ValueError as error:
            raise SpearError(f"the search index is damaged ({error}): {self._mend}.") from error

    def _look_up(self, term: str) -> tuple[int, int, int, int] | None:
        """Find first block, documents, peak and map of a term, by binary search."""
        key = term.encode("utf-8", "surrogatepass")
        held = self._packed
        # By hand, since NumPy cannot search terms of unlike lengths, and a list of all would copy the mapped bytes.
        low, high = 0, len(held.frequencies)
        while low < high:
            middle = (low + high) // 2
            found = held.term_bytes[held.term_ends[middle] : held.term_ends[middle + 1]].tobytes()
            if found == key:
                place = int(np.searchsorted(held.mapped, np.uint32(middle)))
                is_mapped = place < len(held.mapped) and held.mapped[place] == middle
                return (
                    int(held.starts[middle]),
                    int(held.frequencies[middle]),
                    int(held.peaks[middle]),
                    place if is_mapped else -1,
                )
            if found < key:
                low = middle + 1
            else:
                high = middle
        return None
