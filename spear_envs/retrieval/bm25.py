"""BM25 as a retriever: Lucene's ranking with Anserini's settings, in memory or mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spear_envs.bm25.index import SearchIndex
from spear_envs.bm25.packing import K1, B
from spear_envs.core.errors import SpearError
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.manifest import MEND, POSTINGS, Part, open_manifest
from spear_envs.retrieval.retriever import Hit

IN_MEMORY_ROWS = 100_000
"""Documents that may be indexed at the start of a service: some 30 seconds."""
VERSION = 1
"""Raised when the analysis or the scores change."""


class BM25Retriever:
    """Finds documents by words, scored as in Lucene (k1 = 0.9, b = 0.4, English analysis).

    Args:
        index: folder with the part ``bm25``, written by ``spear index build``; None indexes the corpus in memory.

    Raises:
        SpearError: the index is of another corpus, or cannot be read; or the corpus is too large to be indexed in
            memory.
    """

    def __init__(self, corpus: Corpus, index: Path | None = None) -> None:
        if index is not None:
            self._index = SearchIndex.open(open_manifest(index, Part.BM25, corpus).folder / POSTINGS, MEND)
        elif len(corpus) <= IN_MEMORY_ROWS:
            self._index = SearchIndex.in_memory(corpus.texts())
        else:
            raise SpearError(
                f"a corpus of {len(corpus):,} documents needs an index on disk: make one with 'spear index build "
                "--type bm25' and name its folder."
            )
        if len(self._index) != len(corpus):
            raise SpearError(
                f"the index {index} holds {len(self._index):,} documents and the corpus {len(corpus):,}: they do not "
                "belong together; build the index again."
            )
        self._mapped = index is not None
        self.rows = len(corpus)
        self.fingerprint = hashlib.sha256(f"bm25 {VERSION} {corpus.fingerprint}".encode()).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return 1 for each query: they are searched one by one."""
        return [1] * len(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. Scores are float32 values above 0."""
        return [self._index.search_scored(query, k) for query in queries]

    def describe(self) -> dict[str, Any]:
        """Kind and settings."""
        return {"kind": "bm25", "k1": float(str(K1)), "b": float(str(B)), "mapped": self._mapped}
