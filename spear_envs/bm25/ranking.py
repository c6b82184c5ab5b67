"""BM25 over postings: every document that holds a term of the query is scored, and the best are kept.

Scores are Lucene's to the last bit, since equal scores are ordered by document number: float32 for each term, summed in
float64, compared as float32. The compiled loop of ``_scatter.c`` is used where the installation could build it;
``rank_with_numpy`` gives the same order and takes some ten times as long on a million documents.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Rank", "choose_rank", "rank_with_numpy"]


class Rank(Protocol):
    """How documents are scored and the best chosen."""

    def __call__(
        self,
        documents: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint16],
        norms: npt.NDArray[np.uint8],
        factors: npt.NDArray[np.float32],
        spans: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        k: int,
        /,
    ) -> list[tuple[int, float]]:
        """Numbers and scores of the ``k`` best documents, best first, equal ones in ascending order.

        Args:
            documents, counts, norms: of the postings.
            factors: float32 (256,), one over the length normalisation of each quantised length.
            spans: int64 (M, 2), where the pairs of each term of the query begin and end.
            weights: float32 (M,), of each term.
            k: at least 1.

        Raises:
            ValueError: the arrays contradict each other, or hold document numbers that no index has.
        """


def rank_with_numpy(
    documents: npt.NDArray[np.uint32],
    counts: npt.NDArray[np.uint16],
    norms: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
    spans: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    k: int,
    /,
) -> list[tuple[int, float]]:
    """See :class:`Rank`."""
    sums = np.zeros(len(norms))
    for (start, end), weight in zip(spans.tolist(), weights, strict=True):
        if not 0 <= start <= end <= len(documents):
            raise ValueError("a term's postings lie outside the array")
        numbers = documents[start:end]
        if len(numbers) and (numbers[-1] >= len(norms) or (numbers[1:] <= numbers[:-1]).any()):
            raise ValueError("document numbers are not ascending")
        sums[numbers] += weight - weight / (np.float32(1) + counts[start:end] * factors[norms[numbers]])
    found = np.flatnonzero(sums)
    scores = sums[found].astype(np.float32)
    if len(found) > k:
        kept = scores >= np.partition(scores, -k)[-k]
        found, scores = found[kept], scores[kept]
    best = np.lexsort((found, -scores))[:k]
    return list(zip(found[best].tolist(), scores[best].tolist(), strict=True))


def choose_rank() -> Rank:
    """The compiled loop, or NumPy's where the installation had no compiler."""
    try:
        from spear_envs.bm25._scatter import rank_hits
    except ImportError:
        return rank_with_numpy
    return rank_hits
