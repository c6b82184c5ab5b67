"""Retrievers over a corpus in this process: by words, by vectors, and by both."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from spear_envs.bm25.index import SearchIndex
from spear_envs.bm25.packing import K1, B
from spear_envs.core.errors import SpearError, choose_member, name_error
from spear_envs.retrieval.corpus import (
    EXACT,
    EXPORT,
    INDEX,
    MEND,
    POSTINGS,
    Corpus,
    Hit,
    IndexManifest,
    Part,
    open_manifest,
)
from spear_envs.retrieval.encoders import (
    MODEL,
    Encoder,
    EncoderSpec,
    OnnxEncoder,
    TorchEncoder,
    check_device,
    describe_model,
    find_model,
)
from spear_envs.retrieval.retriever import Load, Passage, Retriever
from spear_envs.retrieval.vectors import VectorIndex, parse_type

IN_MEMORY_ROWS = 100_000
"""Documents that may be indexed at the start of a service: some 30 seconds."""
FEW_ROWS = 20_000
"""BM25 over this many takes a tenth of a millisecond per query."""
BM25_VERSION = 1
"""Raised when the analysis or the scores change."""
PROBES, PROBE_HITS = 5, 10
DEPTH = 50
"""Hits of each index that count in a fusion."""
CONSTANT = 60
"""Constant of reciprocal rank fusion, from its paper: rank r, from 1, gives 1 / (60 + r)."""
# The knowledge base of an environment: by name, since this package imports none, and loaded only when it is served.
EMBEDDED_BASE = EntryPoint("mini", "spear_envs.search.embedded:open_base", "spear.corpora")


class CorpusRetriever(Retriever):
    """Ranks the rows of a corpus. Call it from one thread at a time.

    Any text is a query, and the first hits do not depend on ``k``.
    """

    def __init__(self, corpus: Corpus, made_of: str) -> None:
        self.corpus = corpus
        self.passages: int = len(corpus)
        self.fingerprint = hashlib.sha256(made_of.encode("ascii")).hexdigest()

    @abstractmethod
    def rank(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Find at most ``k`` hits for each query, best first, ties to the lower row, no row twice.

        Raises:
            SpearError: ``k`` is below 1, or the index is damaged.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return kind and settings as plain data, without the corpus."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""
        corpus = self.corpus
        return [[Passage(corpus, score, row) for row, score in hits] for hits in self.rank(queries, k)]

    def describe(self) -> dict[str, Any]:
        """Describe the index and the corpus."""
        return {**self.settings(), "corpus": self.corpus.fingerprint}


class BM25Index(CorpusRetriever):
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
        super().__init__(corpus, f"bm25 {BM25_VERSION} {corpus.fingerprint}")
        if len(corpus) <= FEW_ROWS:
            self.load = Load(queries=16, on_loop=True)

    def rank(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`CorpusRetriever`. Scores are float32 values above 0."""
        return [self._index.search_scored(query, k) for query in queries]

    def settings(self) -> dict[str, Any]:
        """Return kind and settings."""
        return {"kind": "bm25", "k1": float(str(K1)), "b": float(str(B)), "mapped": self._mapped}


class DenseIndex(CorpusRetriever):
    """Rows whose vectors have the greatest inner product with the query's.

    Args:
        index: folder with the part ``dense``, written by ``spear index build``.
        encoder: folder of the model, or the name of an installed one; only needed if the index lacks an export and the
            model has moved.
        ef_search: of an HNSW index, 128 by default.
        nprobe: lists of an IVF index to search, an eighth of them by default.
        device: of torch, for encoding queries; in float16 by the model itself except on ``"cpu"``. faiss also searches
            a flat or IVF index there, if its GPU build is installed.

    Raises:
        SpearError: the index is missing, damaged, of another corpus, model or length; passages do not find themselves
            in it; or the device is missing.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    def __init__(
        self,
        corpus: Corpus,
        index: Path,
        *,
        encoder: str | Path | None = None,
        ef_search: int | None = None,
        nprobe: int | None = None,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        check_device(device)
        manifest = open_manifest(index, Part.DENSE, corpus)
        try:
            kind = parse_type(manifest.settings["type"])
            dimension = int(manifest.settings["dimension"])
            spec = EncoderSpec.from_plain(manifest.settings["encoder"])
        except (KeyError, TypeError, ValueError) as error:
            raise SpearError(f"{manifest.folder}: the manifest is damaged ({name_error(error)}): {MEND}.") from error
        self._encoder = _open_encoder(manifest, spec, encoder, threads, device)
        self._index = VectorIndex(
            manifest.folder / INDEX,
            kind,
            exact=manifest.folder / EXACT if kind.needs_exact else None,
            ef_search=ef_search,
            nprobe=nprobe,
            threads=threads,
            device=device,
        )
        self._threads = threads
        found = self._index.rows, self._index.dimension, self._encoder.dimension
        if found != (len(corpus), dimension, dimension):
            raise SpearError(
                f"{manifest.folder}: {found[0]:,} vectors of {found[1]} dimensions, a corpus of {len(corpus):,} "
                f"documents and an encoder of {found[2]} dimensions do not belong together: {MEND}."
            )
        settings = [manifest.fingerprint, self._index.effort, self._encoder.backend, self._index.device]
        super().__init__(corpus, json.dumps(settings))
        self._probe(manifest)

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the tokens of each query for the encoder."""
        return self._encoder.lengths(queries)

    def rank(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`CorpusRetriever`. Scores are cosines to six digits.

        A list has no more hits than a walk through an HNSW graph keeps candidates (``ef_search``), or 128 if the index
        is coarse.
        """
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        if not queries:
            return []
        return self._index.find(self._encoder.encode_queries(queries), k)

    def settings(self) -> dict[str, Any]:
        """Return kind and settings."""
        spec = self._encoder.spec
        return {
            "kind": "dense",
            "index": self._index.type.name,
            **self._index.effort,
            "reranked": self._index.reranked,
            "encoder": spec.model,
            "encoder_fingerprint": spec.fingerprint,
            "backend": self._encoder.backend,
            "searched_on": self._index.device,
            "dimension": self._encoder.dimension,
            "max_length": spec.max_length,
            "query_prefix": spec.query_prefix,
            "threads": self._threads,
        }

    def _probe(self, manifest: IndexManifest) -> None:
        """Check that passages find themselves: a shifted corpus or another model would give fluent nonsense."""
        rows = sorted({round(share * (self.passages - 1) / (PROBES - 1)) for share in range(PROBES)})
        vectors = self._encoder.encode_passages([self.corpus.document(row)["contents"] for row in rows])
        found = self._index.find(vectors, PROBE_HITS)
        # An approximate search may miss one, and one may have many duplicates.
        missed = [row for row, hits in zip(rows, found, strict=True) if row not in {hit for hit, _ in hits}]
        if 2 * len(missed) >= len(rows):
            raise SpearError(
                f"{manifest.folder}: {len(missed)} of {len(rows)} passages do not find themselves (row {missed[0]}, "
                f"for instance): the index is of another corpus or model; {MEND}."
            )


def _open_encoder(
    manifest: IndexManifest, spec: EncoderSpec, model: str | Path | None, threads: int, device: str
) -> Encoder:
    """Open the export in the index (on the CPU) or the model, which must be the one of the index."""
    exported = device == "cpu" and f"{EXPORT}/{MODEL}" in manifest.files
    if model is None and exported:
        return OnnxEncoder(manifest.folder / EXPORT, spec, threads=threads)
    try:
        folder = find_model(model if model is not None else str(manifest.notes.get("model_folder", "")))
    except SpearError as error:
        if model is not None:
            raise
        raise SpearError(f"the model of {manifest.folder} is gone; name its new place as encoder: {error}") from error
    found = describe_model(
        folder, query_prefix=spec.query_prefix, passage_prefix=spec.passage_prefix, max_length=spec.max_length
    )
    if found.fingerprint != spec.fingerprint:
        others = sorted(name for name in {*found.files, *spec.files} if found.files.get(name) != spec.files.get(name))
        raise SpearError(
            f"{folder} is another model than {spec.model}, of which {manifest.folder} was made "
            f"({', '.join(others[:3])} {'differ' if len(others) > 1 else 'differs'}): give that model, or {MEND}."
        )
    if exported:
        return OnnxEncoder(manifest.folder / EXPORT, spec, threads=threads)
    return TorchEncoder(folder, spec, device=device, threads=threads)


class HybridIndex(CorpusRetriever):
    """Fuses indexes by reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009).

    Scores are Σ 1/(60 + rank) over the first 50 hits of each.

    Args:
        parts: over one corpus, at least one.

    Raises:
        SpearError: they are over corpora of different lengths.
    """

    def __init__(self, parts: Sequence[CorpusRetriever]) -> None:
        if len({part.passages for part in parts}) != 1:
            lengths = ", ".join(f"{part.passages:,}" for part in parts)
            raise SpearError(f"indexes of {lengths} documents cannot be fused: give them one corpus.")
        self._parts = tuple(parts)
        super().__init__(parts[0].corpus, json.dumps([DEPTH, CONSTANT, *(part.fingerprint for part in parts)]))

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return for each query the greatest length that a part gives."""
        return [max(lengths) for lengths in zip(*(part.lengths(queries) for part in self._parts), strict=True)]

    def rank(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`CorpusRetriever`. A list has at most 50 hits for each part."""
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        fused: list[dict[int, float]] = [{} for _ in queries]
        for part in self._parts:
            for scores, hits in zip(fused, part.rank(queries, DEPTH), strict=True):
                for rank, (row, _) in enumerate(hits, start=1):
                    scores[row] = scores.get(row, 0.0) + 1 / (CONSTANT + rank)
        return [sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k] for scores in fused]

    def settings(self) -> dict[str, Any]:
        """Return kind and settings, and those of the parts."""
        own = {"kind": "hybrid", "fusion": "reciprocal rank", "depth": DEPTH, "constant": CONSTANT}
        return {**own, "parts": [part.settings() for part in self._parts]}


class IndexKind(Enum):
    """How an index finds rows."""

    BM25 = "bm25"
    """Finds rows by their words. Needs no extra and no model."""
    DENSE = "dense"
    """Finds rows by the vectors of a sentence encoder. Needs the extra ``search`` and an index on disk."""
    HYBRID = "hybrid"
    """Finds rows by words and by vectors, fused by reciprocal rank."""


def open_index(kind: str | IndexKind, corpus: Corpus, index: Path | None = None, **settings: Any) -> CorpusRetriever:
    """Open the index of a corpus.

    Args:
        index: folder that ``spear index build`` wrote. BM25 over at most 100,000 documents needs none.
        settings: of :class:`DenseIndex`.

    Raises:
        SpearError: the kind is unknown; or the index is missing, damaged, or of another corpus or model.
        ModuleNotFoundError: a dense index without the extra ``search``.
    """
    kind = choose_member(IndexKind, kind, "retriever")
    if kind is IndexKind.BM25:
        usual = {"threads": 1, "device": "cpu"}
        if names := [name for name, value in settings.items() if value != usual.get(name)]:
            raise SpearError(f"BM25 does not use {' and '.join(names)}: leave them out.")
        return BM25Index(corpus, index)
    if index is None:
        raise SpearError(
            f"retriever={kind.value!r} needs an index: make one with 'spear index build' and give its folder."
        )
    dense = DenseIndex(corpus, index, **settings)
    if kind is IndexKind.DENSE:
        return dense
    has_words = (Path(index) / Part.BM25.value).is_dir()
    return HybridIndex([BM25Index(corpus, index if has_words else None), dense])


def open_corpus(
    kind: str = "bm25",
    corpus: Path | None = None,
    index: Path | None = None,
    *,
    base: Corpus | None = None,
    **settings: Any,
) -> CorpusRetriever:
    """Open a corpus and its index.

    Args:
        corpus: a JSON Lines file; None for ``base``.
        base: by default the embedded knowledge base.
        kind, index, settings: as of :func:`open_index`.

    Raises:
        SpearError: corpus or index cannot be opened, or do not belong together.
    """
    if corpus:
        base = Corpus.open(corpus)
    elif base is None:
        base = Corpus.in_memory(EMBEDDED_BASE.load()().corpus)
    return open_index(kind, base, index, **settings)
