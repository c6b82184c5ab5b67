"""A faiss index of the vectors of a corpus: mapped, so that processes share it, and searched reproducibly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.kinds import Code, Family, IndexType
from spear_envs.retrieval.manifest import MEND
from spear_envs.retrieval.retriever import Hit

EF_SEARCH = 128
"""Candidates that a walk through an HNSW graph keeps. faiss reads an index with 16, whatever it was built with."""
SPARE = 16
"""Hits looked at beyond those asked for, so that ties at the end go to the lower row."""
RERANKED = 128
"""Candidates of a coarse index that are compared exactly."""
DIGITS = 6
"""Decimal digits of a score; further ones are rounding, which differs with the batch."""


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

        for name, value, family in (("ef_search", ef_search, Family.HNSW), ("nprobe", nprobe, Family.IVF)):
            if value is not None and (kind.family is not family or value < 1):
                raise SpearError(f"{name}={value} does not go with {kind.name}: it is for {family.value}, at least 1.")
        # IO_FLAG_MMAP maps the lists of an IVF index but nothing of a graph; IO_FLAG_MMAP_IFC does the opposite.
        flag = faiss.IO_FLAG_MMAP if kind.family is Family.IVF else faiss.IO_FLAG_MMAP_IFC
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
        if kind.family is Family.HNSW:
            self._index.hnsw.efSearch = ef_search or EF_SEARCH
            self.effort = {"efSearch": self._index.hnsw.efSearch}
        elif kind.family is Family.IVF:
            self._index.nprobe = min(nprobe or kind.default_probes, self._index.nlist)
            # By default each search starts 32 threads to read ahead, which takes longer than most searches.
            lists: Any = faiss.downcast_InvertedLists(self._index.invlists)
            lists.prefetch_nthread = 0
            self.effort = {"nprobe": self._index.nprobe}
        self.device = "cpu"
        if device != "cpu" and kind.family is not Family.HNSW and hasattr(faiss, "StandardGpuResources"):
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
        elif self.type.family is Family.HNSW:
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
    coded = {"IndexScalarQuantizer": Code.SQ8, "IndexIVFScalarQuantizer": Code.SQ8, "IndexIVFPQ": Code.PQ}
    code = coded.get(type(storage).__name__, Code.FLAT)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        return None
    if code is Code.SQ8 and storage.sq.qtype != faiss.ScalarQuantizer.QT_8bit:
        return None
    if name in ("IndexFlat", "IndexFlatIP"):
        return IndexType(Family.FLAT)
    if name in ("IndexHNSWFlat", "IndexHNSWSQ"):
        return IndexType(Family.HNSW, code, links=index.hnsw.nb_neighbors(0) // 2)
    if name in ("IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ"):
        return IndexType(Family.IVF, code, lists=index.nlist, parts=index.pq.M if code is Code.PQ else 0)
    return None
