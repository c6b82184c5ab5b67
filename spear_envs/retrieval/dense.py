"""Rows by vectors: a sentence encoder and a faiss index, mapped so that processes share it, searched reproducibly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.corpus import Corpus, Hit
from spear_envs.retrieval.encoders import MODEL, Encoder, OnnxEncoder, TorchEncoder, check_device
from spear_envs.retrieval.manifest import (
    EXACT,
    EXPORT,
    INDEX,
    MEND,
    EncoderSpec,
    Manifest,
    Part,
    describe_model,
    find_model,
    open_manifest,
)
from spear_envs.retrieval.plan import IndexType, parse_type

PROBES = 5
PROBE_HITS = 10
EF_SEARCH = 128
"""Candidates that a walk through an HNSW graph keeps. faiss reads an index with 16, whatever it was built with."""
SPARE = 16
"""Hits looked at beyond those asked for, so that ties at the end go to the lower row."""
RERANKED = 128
"""Candidates of a coarse index that are compared exactly."""
DIGITS = 6
"""Decimal digits of a score; further ones are rounding, which differs with the batch."""


class DenseIndex:
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
            raise SpearError(f"{manifest.folder}: the manifest is damaged ({error!r}): {MEND}.") from error
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
        self.rows = len(corpus)
        found = self._index.rows, self._index.dimension, self._encoder.dimension
        if found != (self.rows, dimension, dimension):
            raise SpearError(
                f"{manifest.folder}: {found[0]:,} vectors of {found[1]} dimensions, a corpus of {self.rows:,} "
                f"documents and an encoder of {found[2]} dimensions do not belong together: {MEND}."
            )
        self._probe(corpus, manifest)
        settings = json.dumps([manifest.fingerprint, self._index.effort, self._encoder.backend, self._index.device])
        self.fingerprint = hashlib.sha256(settings.encode("ascii")).hexdigest()

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the tokens of each query for the encoder."""
        return self._encoder.lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See :class:`~spear_envs.retrieval.indexes.Index`. Scores are cosines to six digits.

        A list has no more hits than a walk through an HNSW graph keeps candidates (``ef_search``), or 128 if the index
        is coarse.
        """
        if k < 1:
            raise SpearError(f"k={k}: ask for at least one document.")
        if not queries:
            return []
        return self._index.find(self._encoder.encode_queries(queries), k)

    def describe(self) -> dict[str, Any]:
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

    def _probe(self, corpus: Corpus, manifest: Manifest) -> None:
        """Check that passages find themselves: a shifted corpus or another model would give fluent nonsense."""
        rows = sorted({round(share * (self.rows - 1) / (PROBES - 1)) for share in range(PROBES)})
        vectors = self._encoder.encode_passages([corpus.document(row)["contents"] for row in rows])
        found = self._index.find(vectors, PROBE_HITS)
        # An approximate search may miss one, and one may have many duplicates.
        missed = [row for row, hits in zip(rows, found, strict=True) if row not in {hit for hit, _ in hits}]
        if 2 * len(missed) >= len(rows):
            raise SpearError(
                f"{manifest.folder}: {len(missed)} of {len(rows)} passages do not find themselves (row {missed[0]}, "
                f"for instance): the index is of another corpus or model; {MEND}."
            )


def _open_encoder(
    manifest: Manifest, spec: EncoderSpec, model: str | Path | None, threads: int, device: str
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


class VectorIndex:
    """Finds the vectors with the greatest inner product.

    Args:
        exact: file of the vectors in float16, (N, D), for types that are too coarse without it.
        ef_search: of HNSW, 128 by default.
        nprobe: lists of IVF to look into, an eighth of them by default.
        device: ``"cuda"`` or ``"cuda:1"`` moves a flat or IVF index to the GPU, vectors in float16, if faiss has GPU
            support.

    Attributes:
        type: of the index.
        rows: N.
        dimension: D.
        effort: how thoroughly it searches, by faiss's name; empty if it compares all vectors.
        device: the device that searches.

    Raises:
        SpearError: the file cannot be read or is of another type, or a setting does not fit the type.
    """

    def __init__(
        self,
        path: Path,
        kind: IndexType,
        *,
        exact: Path | None = None,
        ef_search: int | None = None,
        nprobe: int | None = None,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        import faiss

        for name, value, family in (("ef_search", ef_search, "HNSW"), ("nprobe", nprobe, "IVF")):
            if value is not None and (kind.family != family or value < 1):
                raise SpearError(f"{name}={value} does not go with {kind.name}: it is for {family}, at least 1.")
        # IO_FLAG_MMAP maps the lists of an IVF index but nothing of a graph; IO_FLAG_MMAP_IFC does the opposite.
        flag = faiss.IO_FLAG_MMAP if kind.family == "IVF" else faiss.IO_FLAG_MMAP_IFC
        self._index: Any
        try:
            self._index = faiss.read_index(str(path), flag)
        except RuntimeError as error:
            raise SpearError(f"{path} cannot be read as a faiss index: {MEND}.") from error
        if _classify(self._index) != kind:
            raise SpearError(f"{path} is not an index of type {kind.name} by inner product: {MEND}.")
        self.type = kind
        self.rows, self.dimension = int(self._index.ntotal), int(self._index.d)
        self.effort: dict[str, int] = {}
        if kind.family == "HNSW":
            self._index.hnsw.efSearch = ef_search or EF_SEARCH
            self.effort = {"efSearch": self._index.hnsw.efSearch}
        elif kind.family == "IVF":
            self._index.nprobe = min(nprobe or kind.default_probes, self._index.nlist)
            # By default each search starts 32 threads to read ahead, which takes longer than most searches.
            lists: Any = faiss.downcast_InvertedLists(self._index.invlists)
            lists.prefetch_nthread = 0
            self.effort = {"nprobe": self._index.nprobe}
        self.device = "cpu"
        if device != "cpu" and kind.family != "HNSW" and hasattr(faiss, "StandardGpuResources"):
            self._index, self.device = _move(self._index, device), device
        self._threads = threads
        self._exact: npt.NDArray[np.float16] | None = None
        if exact is not None:
            if exact.stat().st_size != 2 * self.rows * self.dimension:
                raise SpearError(f"{exact} does not hold {self.rows:,} vectors of {self.dimension} dimensions: {MEND}.")
            self._exact = np.memmap(exact, "<f2", "r", shape=(self.rows, self.dimension))

    @property
    def reranked(self) -> int:
        """Return the number of candidates compared exactly; 0 if the index's own scores are used."""
        return 0 if self._exact is None else RERANKED

    def find(self, vectors: npt.NDArray[np.float32], k: int) -> list[list[Hit]]:
        """Find at most ``k`` hits for each of (Q, D) vectors, best first, ties to the lower row; scores to six digits.

        The first hits do not depend on ``k``: a walk through a graph and the exact comparison return at most as many
        hits as they have candidates.
        """
        import faiss

        depth = k + SPARE
        if self._exact is not None:
            depth = RERANKED
        elif self.type.family == "HNSW":
            depth = min(depth, self.effort["efSearch"])
        faiss.omp_set_num_threads(self._threads)  # applies to the calling thread, so it is set each time
        vectors = np.ascontiguousarray(vectors, np.float32)
        scores, rows = self._index.search(vectors, min(depth, self.rows))
        if self._exact is not None:
            scores = np.einsum("qd,qrd->qr", vectors, self._exact[np.maximum(rows, 0)].astype(np.float32))
        return [_order_hits(*pair)[:k] for pair in zip(rows, scores, strict=True)]


def _move(index: Any, device: str) -> Any:
    """Copy an index to a GPU."""
    import faiss

    library: Any = faiss
    options = library.GpuClonerOptions()
    options.useFloat16 = True
    number = int(device.partition(":")[2] or 0)
    return library.index_cpu_to_gpu(library.StandardGpuResources(), number, index, options)


def _order_hits(rows: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> list[Hit]:
    """Order the hits of one query: best first, ties to the lower row, without the -1 of faiss's padding."""
    found = [(row, round(score, DIGITS)) for row, score in zip(rows.tolist(), scores.tolist(), strict=True) if row >= 0]
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))


def read_type(path: Path) -> IndexType:
    """Read the type of a faiss index that another program built.

    Raises:
        SpearError: it cannot be read, or is of a type that this package does not build.
    """
    import faiss

    index: Any
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise SpearError(f"{path} cannot be read as a faiss index (parts not yet joined?): check the file.") from error
    kind = _classify(index)
    if kind is None:
        raise SpearError(
            f"{path} holds a {type(index).__name__}, which cannot be imported: it must be Flat, HNSW or IVF, with "
            "float32 or 8-bit vectors, by inner product."
        )
    return kind


def _classify(index: Any) -> IndexType | None:
    """Return the type of a faiss index; None if this package does not build it."""
    import faiss

    name = type(index).__name__
    storage: Any = faiss.downcast_index(index.storage) if hasattr(index, "storage") else index
    coded = {"IndexScalarQuantizer": "SQ8", "IndexIVFScalarQuantizer": "SQ8", "IndexIVFPQ": "PQ"}
    code = coded.get(type(storage).__name__, "Flat")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        return None
    if code == "SQ8" and storage.sq.qtype != faiss.ScalarQuantizer.QT_8bit:
        return None
    if name in ("IndexFlat", "IndexFlatIP"):
        return IndexType("Flat")
    if name in ("IndexHNSWFlat", "IndexHNSWSQ"):
        return IndexType("HNSW", code, links=index.hnsw.nb_neighbors(0) // 2)
    if name in ("IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ"):
        return IndexType("IVF", code, lists=index.nlist, parts=index.pq.M if code == "PQ" else 0)
    return None
