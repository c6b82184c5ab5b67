"""Passages by vectors: a sentence encoder, and a faiss index that all processes share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.encoders import MODEL, Encoder, OnnxEncoder, TorchEncoder
from spear_envs.retrieval.kinds import Code, Family, IndexType, parse_type
from spear_envs.retrieval.manifest import EXACT, EXPORT, INDEX, MEND, Manifest, Part, open_manifest
from spear_envs.retrieval.models import EncoderSpec, describe_model, find_model
from spear_envs.retrieval.retriever import Hit

__all__ = ["EF_SEARCH", "DenseRetriever", "load_index", "order_hits", "read_type", "search_index"]

EF_SEARCH = 128
"""Candidates that a walk through an HNSW graph keeps. faiss reads an index with 16, whatever its builder meant, and
finds 0.79 of the three nearest of 100,000 then; with 128 it is 0.99."""
SPARE = 16
"""Hits beyond ``k`` that are asked for, so that ties at the end go to the lower row."""
RERANKED = 100
"""Candidates that are compared exactly where the index is coarse."""
DIGITS = 6
"""Of a score; the others are rounding, which differs with the batch."""
PROBES = 5
PROBE_HITS = 10


class DenseRetriever:
    """Passages whose vectors have the greatest inner product with the query's.

    Args:
        corpus: what is searched.
        index: folder with the part ``dense``, written by ``spear index build``.
        encoder: folder of the model, or the name of an installed one. Needed only if the index has no export of the
            model and the model has moved since.
        ef_search: of an HNSW index, 128 by default.
        nprobe: lists of an IVF index that are looked into, an eighth of them by default.
        threads: of the processor, for a batch.

    Raises:
        SpearError: the index is missing, damaged, of another corpus, model or length; or passages do not find
            themselves in it.
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
    ) -> None:
        manifest = open_manifest(index, Part.DENSE, corpus)
        try:
            self._type = parse_type(manifest.settings["type"])
            dimension = int(manifest.settings["dimension"])
            spec = EncoderSpec.from_plain(manifest.settings["encoder"])
        except (KeyError, TypeError, ValueError) as error:
            raise SpearError(f"{manifest.folder}: the manifest is damaged ({error!r}): {MEND}.") from error
        self._encoder = _open_encoder(manifest, spec, encoder, threads)
        self._index, self._effort = load_index(manifest.folder / INDEX, self._type, ef_search=ef_search, nprobe=nprobe)
        self._threads = threads
        self.rows = len(corpus)
        found = self._index.ntotal, self._index.d, self._encoder.dimension
        if found != (self.rows, dimension, dimension):
            raise SpearError(
                f"{manifest.folder}: {found[0]:,} vectors of {found[1]} dimensions, a corpus of {self.rows:,} "
                f"documents and an encoder of {found[2]} dimensions do not belong together: {MEND}."
            )
        self._exact: npt.NDArray[np.float16] | None = None
        if self._type.needs_exact:
            self._exact = np.memmap(manifest.folder / EXACT, "<f2", "r", shape=(self.rows, dimension))
        self._probe(corpus, manifest)
        settings = json.dumps([manifest.fingerprint, self._effort, self._encoder.backend])
        self.fingerprint = hashlib.sha256(settings.encode("ascii")).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Tokens that the encoder reads of each query."""
        return self._encoder.lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. Scores are cosines to six digits.

        The first hits do not depend on ``k`` while it is at most 100 and below ``ef_search``.
        """
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        if not queries:
            return []
        return self._find(self._encoder.encode_queries(queries), k)

    def describe(self) -> dict[str, Any]:
        """Kind and settings."""
        spec = self._encoder.spec
        return {
            "kind": "dense",
            "index": self._type.name,
            **self._effort,
            "reranked": RERANKED if self._exact is not None else 0,
            "encoder": spec.model,
            "encoder_fingerprint": spec.fingerprint,
            "backend": self._encoder.backend,
            "dimension": self._encoder.dimension,
            "max_length": spec.max_length,
            "query_prefix": spec.query_prefix,
            "threads": self._threads,
        }

    def _find(self, vectors: npt.NDArray[np.float32], k: int) -> list[list[Hit]]:
        depth = k + SPARE if self._exact is None else max(k + SPARE, RERANKED)
        scores, rows = search_index(self._index, vectors, depth, self._threads)
        if self._exact is not None:
            exact = self._exact[np.maximum(rows, 0)].astype(np.float32)
            scores = np.einsum("qd,qrd->qr", vectors, exact)
        return [order_hits(*pair)[:k] for pair in zip(rows, scores, strict=True)]

    def _probe(self, corpus: Corpus, manifest: Manifest) -> None:
        """Passages must find themselves: a shifted corpus, or another model, would give fluent nonsense."""
        rows = sorted({round(share * (self.rows - 1) / (PROBES - 1)) for share in range(PROBES)})
        vectors = self._encoder.encode_passages([corpus.document(row)["contents"] for row in rows])
        found = self._find(vectors, PROBE_HITS)
        # An approximate search may miss one, and one may have many equals.
        missed = [row for row, hits in zip(rows, found, strict=True) if row not in {hit for hit, _ in hits}]
        if 2 * len(missed) >= len(rows):
            raise SpearError(
                f"{manifest.folder}: {len(missed)} of {len(rows)} passages do not find themselves (row {missed[0]}, "
                f"for instance): the index is of another corpus or model; {MEND}."
            )


def load_index(
    path: Path, kind: IndexType, *, ef_search: int | None = None, nprobe: int | None = None
) -> tuple[Any, dict[str, int]]:
    """Map a faiss index.

    Returns:
        The index, and how thoroughly it will search, by the name that faiss has for it.

    Raises:
        SpearError: it cannot be read, is of another type, or a setting does not fit the type.
    """
    import faiss

    for name, value, family in (("ef_search", ef_search, Family.HNSW), ("nprobe", nprobe, Family.IVF)):
        if value is not None and (kind.family is not family or value < 1):
            raise SpearError(f"{name}={value} does not go with {kind.name}: it is for {family.value}, and at least 1.")
    # IO_FLAG_MMAP maps the lists of an IVF index and nothing of a graph; IO_FLAG_MMAP_IFC is the other way round.
    flag = faiss.IO_FLAG_MMAP if kind.family is Family.IVF else faiss.IO_FLAG_MMAP_IFC
    index: Any
    try:
        index = faiss.read_index(str(path), flag)
    except RuntimeError as error:
        raise SpearError(f"{path} cannot be read as a faiss index: {MEND}.") from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or hasattr(index, "hnsw") != (kind.family is Family.HNSW):
        raise SpearError(f"{path} holds no index of type {kind.name} by inner product: {MEND}.")
    if kind.family is Family.HNSW:
        index.hnsw.efSearch = ef_search or EF_SEARCH
        return index, {"efSearch": index.hnsw.efSearch}
    if kind.family is Family.IVF:
        index.nprobe = min(nprobe or kind.default_probes, index.nlist)
        return index, {"nprobe": index.nprobe}
    return index, {}


def read_type(path: Path) -> IndexType:
    """The type of a faiss index that others built.

    Raises:
        SpearError: it cannot be read, or is of a type that is not built here.
    """
    import faiss

    index: Any
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise SpearError(f"{path} cannot be read as a faiss index (parts not yet joined?): check the file.") from error
    name = type(index).__name__
    storage: Any = faiss.downcast_index(index.storage) if hasattr(index, "storage") else index
    coded = {"IndexScalarQuantizer": Code.SQ8, "IndexIVFScalarQuantizer": Code.SQ8, "IndexIVFPQ": Code.PQ}
    code = coded.get(type(storage).__name__, Code.FLAT)
    eight_bit = code is not Code.SQ8 or storage.sq.qtype == faiss.ScalarQuantizer.QT_8bit
    if index.metric_type == faiss.METRIC_INNER_PRODUCT and eight_bit:
        if name in ("IndexFlat", "IndexFlatIP"):
            return IndexType(Family.FLAT)
        if name in ("IndexHNSWFlat", "IndexHNSWSQ"):
            return IndexType(Family.HNSW, code, links=index.hnsw.nb_neighbors(0) // 2)
        if name in ("IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ"):
            return IndexType(Family.IVF, code, lists=index.nlist, parts=index.pq.M if code is Code.PQ else 0)
    raise SpearError(
        f"{path} holds a {name}, which cannot be taken over: it must be Flat, HNSW or IVF, with float32 or 8-bit "
        "vectors, by inner product."
    )


def search_index(
    index: Any, vectors: npt.NDArray[np.float32], depth: int, threads: int = 1
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Scores and rows, (Q, at most ``depth``); -1 stands where faiss found no more."""
    import faiss

    faiss.omp_set_num_threads(threads)  # counts for the thread that calls, so it is said each time
    return index.search(np.ascontiguousarray(vectors, np.float32), min(depth, index.ntotal))


def order_hits(rows: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> list[Hit]:
    """Hits of one query: best first, ties to the lower row, without the -1 of faiss."""
    found = [(row, round(score, DIGITS)) for row, score in zip(rows.tolist(), scores.tolist(), strict=True) if row >= 0]
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))


def _open_encoder(manifest: Manifest, spec: EncoderSpec, model: str | Path | None, threads: int) -> Encoder:
    """The export in the index, or the model; held against what the index was made with."""
    exported = f"{EXPORT}/{MODEL}" in manifest.files
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
    return TorchEncoder(folder, spec, threads=threads)
