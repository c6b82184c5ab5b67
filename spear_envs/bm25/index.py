"""Searching: a query in, the numbers of the best documents out, in Lucene's order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.analysis import analyze
from spear_envs.bm25.files import map_postings
from spear_envs.bm25.postings import QUANTIZED_LENGTHS, Postings, make_postings
from spear_envs.bm25.ranking import Rank, choose_rank
from spear_envs.core.errors import SpearError

__all__ = ["MAX_TERMS", "SearchIndex"]

K1 = np.float32(0.9)
B = np.float32(0.4)
MAX_TERMS = 1_024
"""Distinct terms of a query that count; Lucene refuses a query with more."""
REMEMBERED_TERMS = 1 << 12


class SearchIndex:
    """BM25 with k1 = 0.9 and b = 0.4 over documents that are numbered from 0.

    One index can be used by several threads. Opened from a folder, its arrays are mapped: processes share them.

    Args:
        postings: the documents' terms.
        rank: how to score; the compiled loop by default, where there is one.
    """

    def __init__(self, postings: Postings, rank: Rank | None = None) -> None:
        self._postings = postings
        self._rank = choose_rank() if rank is None else rank
        self._factors = _find_factors(postings)
        self._find_term = lru_cache(maxsize=REMEMBERED_TERMS)(self._look_up)

    @classmethod
    def in_memory(cls, texts: Iterable[str]) -> SearchIndex:
        """An index of some thousand texts, document i being the i-th."""
        return cls(make_postings(texts))

    @classmethod
    def open(cls, folder: Path) -> SearchIndex:
        """The index that :func:`~spear_envs.bm25.build.build_index` wrote, mapped.

        Raises:
            SpearError: there is none, it is half built, of another version, or damaged in a way that shows at once.
        """
        return cls(map_postings(Path(folder)))

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._postings.norms)

    def search(self, query: str, k: int = 50) -> list[int]:
        """Numbers of the ``k`` best documents that hold a term of the query, best first, equal ones in ascending order.

        Any text is a query; operators have no meaning. Of more than 1,024 distinct terms the first 1,024 count.

        Raises:
            SpearError: ``k`` is below 1.
        """
        return [number for number, _ in self.search_scored(query, k)]

    def search_scored(self, query: str, k: int = 50) -> list[tuple[int, float]]:
        """What :meth:`search` finds, each with its score: the float32 that Lucene gives."""
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        spans: list[tuple[int, int]] = []
        weights: list[np.float32] = []
        held = self._postings
        try:
            for term, count in islice(Counter(analyze(query)).items(), MAX_TERMS):
                span = self._find_term(term)
                if span is not None:
                    spans.append(span)
                    weights.append(np.float32(count) * self._find_idf(span[1] - span[0]))
            if not spans:
                return []
            return self._rank(
                held.documents,
                held.counts,
                held.norms,
                self._factors,
                np.array(spans, np.int64),
                np.array(weights, np.float32),
                k,
            )
        except ValueError as error:
            raise SpearError(f"the search index is damaged ({error}): build it again.") from error

    def _find_idf(self, frequency: int) -> np.float32:
        """ln(1 + (N − df + 0.5)/(df + 0.5)), N = documents with at least one term."""
        return np.float32(math.log(1 + (self._postings.filled - frequency + 0.5) / (frequency + 0.5)))

    def _look_up(self, term: str) -> tuple[int, int] | None:
        """Where the pairs of a term begin and end, by binary search."""
        key = term.encode("utf-8", "surrogatepass")
        text, ends = self._postings.term_bytes, self._postings.term_ends
        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high) // 2
            found = text[ends[middle] : ends[middle + 1]].tobytes()
            if found == key:
                return int(self._postings.starts[middle]), int(self._postings.starts[middle + 1])
            if found < key:
                low = middle + 1
            else:
                high = middle
        return None


def _find_factors(postings: Postings) -> npt.NDArray[np.float32]:
    """1 / (k1 · ((1 − b) + b · dl/avgdl)) in float32 for each quantised length dl."""
    average = np.float32(postings.terms_total / max(postings.filled, 1))
    one = np.float32(1)
    lengths = QUANTIZED_LENGTHS.astype(np.float32)
    return one / (K1 * ((one - B) + B * lengths / max(average, one)))
