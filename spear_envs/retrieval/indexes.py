"""Indexes, which rank the rows of one corpus, and the retriever that joins a corpus with its index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Protocol

from spear_envs.bm25.index import SearchIndex
from spear_envs.bm25.packing import K1, B
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.retrieval.corpus import Corpus, Hit
from spear_envs.retrieval.manifest import MEND, POSTINGS, Part, open_manifest
from spear_envs.retrieval.retriever import Load, Passage, Retriever

IN_MEMORY_ROWS = 100_000
"""Documents that may be indexed at the start of a service: some 30 seconds."""
FEW_ROWS = 20_000
"""BM25 over this many takes a tenth of a millisecond per query."""
BM25_VERSION = 1
"""Raised when the analysis or the scores change."""
DEPTH = 50
"""Hits of each index that count in a fusion."""
CONSTANT = 60
"""Of the paper on fusion: rank r, from 1, gives 1 / (60 + r)."""
# The knowledge base of an environment: by name, since this package imports none, and loaded only when it is served.
EMBEDDED_BASE = EntryPoint("mini", "spear_envs.search.embedded:open_base", "spear.corpora")


class Index(Protocol):
    """Ranks rows of one corpus. Call it from one thread at a time."""

    @property
    def rows(self) -> int:
        """Return the number of documents."""

    @property
    def fingerprint(self) -> str:
        """Identify corpus, index, model and settings: equal for indexes that give the same results."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Find at most ``k`` hits for each query, best first, ties to the lower row, no row twice.

        Any text is a query. The first hits do not depend on ``k``.

        Raises:
            SpearError: ``k`` is below 1, or the index is damaged.
        """

    def describe(self) -> dict[str, Any]:
        """Return kind and settings as plain data."""


class BM25Index:
    """Finds documents by words, scored as in Lucene (k1 = 0.9, b = 0.4, English analysis), in memory or mapped.

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
                f"the index {index} holds {len(self._index):,} documents and the corpus {len(corpus):,}: {MEND}."
            )
        self._mapped = index is not None
        self.rows = len(corpus)
        self.fingerprint = hashlib.sha256(f"bm25 {BM25_VERSION} {corpus.fingerprint}".encode()).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return 1 for each query: they are searched one by one."""
        return [1] * len(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`Index`. Scores are float32 values above 0."""
        return [self._index.search_scored(query, k) for query in queries]

    def describe(self) -> dict[str, Any]:
        """Return kind and settings."""
        return {"kind": "bm25", "k1": float(str(K1)), "b": float(str(B)), "mapped": self._mapped}


class HybridIndex:
    """Fuses indexes by reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009).

    Scores are Σ 1/(60 + rank) over the first 50 hits of each.

    Args:
        parts: over one corpus, at least one.

    Raises:
        SpearError: they are over corpora of different lengths.
    """

    def __init__(self, parts: Sequence[Index]) -> None:
        if len({part.rows for part in parts}) != 1:
            lengths = ", ".join(f"{part.rows:,}" for part in parts)
            raise SpearError(f"indexes of {lengths} documents cannot be fused: give them one corpus.")
        self._parts = tuple(parts)
        self.rows = parts[0].rows
        settings = json.dumps([DEPTH, CONSTANT, *(part.fingerprint for part in parts)])
        self.fingerprint = hashlib.sha256(settings.encode("ascii")).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the greatest of the parts."""
        return [max(lengths) for lengths in zip(*(part.lengths(queries) for part in self._parts), strict=True)]

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`Index`. A list has at most 50 hits for each part."""
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        fused: list[dict[int, float]] = [{} for _ in queries]
        for part in self._parts:
            for scores, hits in zip(fused, part.search(queries, DEPTH), strict=True):
                for rank, (row, _) in enumerate(hits, start=1):
                    scores[row] = scores.get(row, 0.0) + 1 / (CONSTANT + rank)
        return [sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k] for scores in fused]

    def describe(self) -> dict[str, Any]:
        """Return kind and settings, and those of the parts."""
        return {
            "kind": "hybrid",
            "fusion": "reciprocal rank",
            "depth": DEPTH,
            "constant": CONSTANT,
            "parts": [part.describe() for part in self._parts],
        }


class IndexKind(Enum):
    """How an index finds rows."""

    BM25 = "bm25"
    """By their words. Needs no extra and no model."""
    DENSE = "dense"
    """By the vectors of a sentence encoder. Needs the extra ``search`` and an index on disk."""
    HYBRID = "hybrid"
    """By both, fused by reciprocal rank."""


def open_index(
    kind: str | IndexKind,
    corpus: Corpus,
    index: Path | None = None,
    *,
    encoder: str | Path | None = None,
    ef_search: int | None = None,
    nprobe: int | None = None,
    threads: int = 1,
    device: str = "cpu",
) -> Index:
    """Open the index of a corpus.

    Args:
        index: folder that ``spear index build`` wrote. BM25 over at most 100,000 documents needs none.
        encoder, ef_search, nprobe, threads, device: of :class:`~spear_envs.retrieval.dense.DenseIndex`.

    Raises:
        SpearError: the kind is unknown; or the index is missing, damaged, or of another corpus or model.
        ModuleNotFoundError: a dense index without the extra ``search``.
    """
    kind = choose_member(IndexKind, kind, "retriever")
    settings: dict[str, Any] = {
        "encoder": encoder,
        "ef_search": ef_search,
        "nprobe": nprobe,
        "threads": threads,
        "device": device,
    }
    if kind is IndexKind.BM25:
        usual = {"threads": 1, "device": "cpu"}
        if names := [name for name, value in settings.items() if value != usual.get(name)]:
            raise SpearError(f"BM25 does not use {' and '.join(names)}: leave them out.")
        return BM25Index(corpus, index)
    if index is None:
        raise SpearError(
            f"retriever={kind.value!r} needs an index: make one with 'spear index build' and give its folder."
        )
    from spear_envs.retrieval.dense import DenseIndex

    dense = DenseIndex(corpus, index, **settings)
    if kind is IndexKind.DENSE:
        return dense
    has_words = (Path(index) / Part.BM25.value).is_dir()
    return HybridIndex([BM25Index(corpus, index if has_words else None), dense])


class CorpusRetriever(Retriever):
    """A corpus and its index, in this process.

    Raises:
        SpearError: they do not match.
    """

    def __init__(self, corpus: Corpus, index: Index) -> None:
        if index.rows != len(corpus):
            raise SpearError(f"the index has {index.rows:,} passages and the corpus {len(corpus):,}: {MEND}.")
        self._corpus = corpus
        self._index = index
        self.fingerprint = index.fingerprint
        self.passages = len(corpus)
        if index.describe()["kind"] == "bm25" and len(corpus) <= FEW_ROWS:
            self.load = Load(queries=16, on_loop=True)

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return those of the index."""
        return self._index.lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""
        corpus = self._corpus
        return [[Passage(corpus, score, row) for row, score in hits] for hits in self._index.search(queries, k)]

    def describe(self) -> dict[str, Any]:
        """Describe the index and the corpus."""
        return {**self._index.describe(), "corpus": self._corpus.fingerprint}


def open_retriever(
    kind: str = "bm25", corpus: Path | None = None, index: Path | None = None, **settings: Any
) -> CorpusRetriever:
    """Open a corpus and its index.

    Args:
        corpus: a JSON Lines file; None for the embedded knowledge base.
        kind, index, settings: as of :func:`open_index`.

    Raises:
        SpearError: corpus or index cannot be opened, or do not belong together.
    """
    documents = Corpus.open(corpus) if corpus else Corpus.in_memory(EMBEDDED_BASE.load()().corpus)
    return CorpusRetriever(documents, open_index(kind, documents, index, **settings))
