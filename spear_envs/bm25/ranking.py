"""BM25 over packed postings: the best documents with a term of the query.

Scores are Lucene's to the last bit, since equal scores are ordered by document number: float32 for each term, summed in
float64 in the order of the terms, compared as float32. The compiled loop of ``_search.c``, if it could be built, scores
only documents whose bounds can be among the best; ``rank_with_numpy`` scores every document and is its reference in
tests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.packing import BLOCK, count_words, unpack_pairs

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
    """Numbers and scores of the ``k`` best documents, best first, equal ones in ascending order.

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
        sums[numbers] += weight - weight / (np.float32(1) + counts.astype(np.float32) * factors[norms[numbers]])
    found = np.flatnonzero(sums)
    scores = sums[found].astype(np.float32)
    if len(found) > k:
        kept = scores >= np.partition(scores, -k)[-k]
        found, scores = found[kept], scores[kept]
    best = np.lexsort((found, -scores))[:k]
    return list(zip(found[best].tolist(), scores[best].tolist(), strict=True))


def choose_rank() -> Rank:
    """The compiled loop, or NumPy's if it was not compiled."""
    try:
        from spear_envs.bm25._ranking import rank_hits
    except ImportError:
        return rank_with_numpy
    return rank_hits
