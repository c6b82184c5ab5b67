"""Several retrievers as one, by reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.retriever import Hit, Retriever

DEPTH = 50
"""Hits of each retriever that count."""
CONSTANT = 60
"""Of the paper: rank r, from 1, gives 1 / (60 + r)."""


class HybridRetriever:
    """Scores are Σ 1/(60 + rank) over the first 50 hits of each retriever.

    Args:
        parts: over one corpus, at least one.

    Raises:
        SpearError: they are over corpora of different lengths.
    """

    def __init__(self, parts: Sequence[Retriever]) -> None:
        if len({part.rows for part in parts}) != 1:
            lengths = ", ".join(f"{part.rows:,}" for part in parts)
            raise SpearError(f"retrievers over {lengths} documents cannot be fused: give them one corpus.")
        self._parts = tuple(parts)
        self.rows = parts[0].rows
        settings = json.dumps([DEPTH, CONSTANT, *(part.fingerprint for part in parts)])
        self.fingerprint = hashlib.sha256(settings.encode("ascii")).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """The greatest of the parts."""
        return [max(lengths) for lengths in zip(*(part.lengths(queries) for part in self._parts), strict=True)]

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. A list has at most 50 hits for each part."""
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        fused: list[dict[int, float]] = [{} for _ in queries]
        for part in self._parts:
            for scores, hits in zip(fused, part.search(queries, DEPTH), strict=True):
                for rank, (row, _) in enumerate(hits, start=1):
                    scores[row] = scores.get(row, 0.0) + 1 / (CONSTANT + rank)
        return [sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k] for scores in fused]

    def describe(self) -> dict[str, Any]:
        """Kind and settings, and those of the parts."""
        return {
            "kind": "hybrid",
            "fusion": "reciprocal rank",
            "depth": DEPTH,
            "constant": CONSTANT,
            "parts": [part.describe() for part in self._parts],
        }
