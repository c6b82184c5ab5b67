"""Vector indexes: types by the names of faiss, what each takes before it is built, and searching one, mapped.

Sizes follow from the type. Times are extrapolated from measurements on one core and give only an order of magnitude;
encoding can be measured on the spot.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.core.machine import find_free_memory
from spear_envs.data.files import format_bytes
from spear_envs.retrieval.corpus import MEND, Hit

EXAMPLES = ("Flat", "HNSW32", "HNSW64", "HNSW32,SQ8", "IVF,Flat", "IVF4096,SQ8", "IVF,PQ96")
LINKS = 32
EF_CONSTRUCTION = 200
MIN_LISTS, MAX_LISTS = 16, 1 << 16
TRAINING_PER_LIST = 64
"""Training vectors for each list of an IVF index; faiss warns below 39."""
TRAINING_VECTORS = 100_000
"""Training vectors for codes."""
_NAME = re.compile(r"(flat)|hnsw(\d{1,9})?(?:[,_-](sq8|flat))?|ivf(\d{1,9})?[,-](flat|sq8|pq(\d{1,9}))", re.IGNORECASE)
WIKI18_ROWS, WIKI18_DIMENSION = 21_015_324, 768
"""Corpus of the paper: its passages, and the dimension of E5-base's vectors."""
PLANNED = ("Flat", "HNSW32", "HNSW64", "HNSW32,SQ8", "IVF,SQ8", "IVF,PQ96")
FLAT_ROWS = 50_000
"""Most documents of which every vector is compared: a millisecond or two a query."""
PROCESS_BYTES = 500 * 10**6
"""Memory of Python, faiss, ONNX Runtime and what they keep for reuse."""
SHARE = 0.9
"""Share of the free memory that a build may use: the rest is for others."""
LINK_SECONDS = 0.98e-3
"""CPU time to link a vector of 384 dimensions into a graph while it grows to 100,000, efConstruction 200, on a busy
2026 server core (`benchmarks/search_vectors.py`). Codes of a byte take as long, and so do 64 links."""
LINK_ROWS, LINK_DIMENSION = 100_000, 384
LINK_ROWS_POWER, LINK_DIMENSION_POWER = 0.28, 1.2
"""Growth of the time: fitted to 0.43 ms for 8,000 vectors and 1.53 ms for 500,000, and to 2.3 times as much at 768
dimensions. Beyond that it is an extrapolation."""
COMPARE_SECONDS = 1e-10
"""CPU time for one dimension of one comparison with a list's centre."""
TRAINING_ROUNDS = 11
"""Rounds of k-means, and one to assign a vector at last."""
ENCODE_SECONDS = 0.035
"""CPU time for one passage of 100 words by MiniLM (384 dimensions), float32 on ONNX Runtime: measured with 2,500. By
other models it is assumed to grow with the cube of the dimension: eight times for E5-base, which has twice the layers
and twice the width."""
GROWTH = {"Flat": 1.02, "HNSW": 1.02, "IVF": 1.35}
"""Greatest memory of an index that grows, over its size at last: measured 1.01, 1.01 and 1.31 with 120,000 vectors of
768 dimensions. Flat and HNSW take theirs at once; the lists of IVF grow by doubling, each by itself."""

EF_SEARCH = 128
"""Candidates that a walk through an HNSW graph keeps. faiss reads an index with 16, whatever it was built with."""
SPARE = 16
"""Hits looked at beyond those asked for, so that ties at the end go to the lower row."""
RERANKED = 128
"""Candidates of a coarse index that are compared exactly."""
DIGITS = 6
"""Decimal digits of a score; further ones are rounding, which differs with the batch."""


@dataclass(frozen=True)
class IndexType:
    """One type of index; its name is the string that faiss makes it from, apart from ``IVF`` without a number."""

    family: str
    """How the vectors to compare with are found: ``Flat`` takes all, ``HNSW`` walks a graph of near ones, and ``IVF``
    takes those of the lists whose centres are nearest."""
    code: str = "Flat"
    """How a vector is stored: ``Flat`` as float32, ``SQ8`` as a byte for each dimension, ``PQ`` as a byte for each of
    some parts, which is too coarse without reranking by exact vectors."""
    links: int = LINKS
    """M of an HNSW graph: links of a vector on each level, twice as many on the lowest."""
    lists: int = 0
    """Lists of an IVF index; 0 until :meth:`resolve` has chosen."""
    parts: int = 0
    """Parts of a product quantiser."""

    @property
    def name(self) -> str:
        """Return the name that :func:`parse_type` reads."""
        if self.family == "Flat":
            return "Flat"
        if self.family == "HNSW":
            return f"HNSW{self.links}" + ("" if self.code == "Flat" else f",{self.code}")
        return f"IVF{self.lists or ''},{self.code}{self.parts or ''}"

    def resolve(self, rows: int, dimension: int) -> IndexType:
        """Return the type with its number of lists: some 4 √rows, a power of two.

        Raises:
            SpearError: the type does not fit the corpus or the vectors.
        """
        if self.code == "PQ" and dimension % self.parts:
            raise SpearError(f"{self.name}: {dimension} dimensions cannot be cut into {self.parts} equal parts.")
        if self.family != "IVF":
            return self
        lists = self.lists or min(max(2 ** round(math.log2(4 * math.sqrt(rows))), MIN_LISTS), MAX_LISTS)
        if rows < lists:
            raise SpearError(f"IVF{lists}: a corpus of {rows:,} documents has fewer than lists; take 'Flat'.")
        return replace(self, lists=lists)

    @property
    def needs_exact(self) -> bool:
        """Return whether exact vectors are kept for reranking."""
        return self.code == "PQ"

    @property
    def _mean_links(self) -> float:
        """Estimate the mean links of a vector in an HNSW graph: on the lowest level, and on the few higher ones."""
        return 2 * self.links + self.links / (self.links - 1)

    def vector_bytes(self, dimension: int) -> float:
        """Compute the bytes of the index for each vector; checked against files of faiss."""
        coded = {"Flat": 4 * dimension, "SQ8": dimension, "PQ": self.parts}[self.code]
        if self.family == "HNSW":
            # Links, the highest level, and where the links begin.
            return coded + 4 * self._mean_links + 12
        return coded + (8 if self.family == "IVF" else 0)

    def index_bytes(self, rows: int, dimension: int) -> float:
        """Compute the bytes of an index of ``rows`` vectors."""
        centres = 4 * dimension * (self.lists + (256 if self.code == "PQ" else 0))
        return rows * self.vector_bytes(dimension) + centres

    def training_vectors(self, rows: int) -> int:
        """Return the number of training vectors; may be 0."""
        if self.family == "IVF":
            return min(rows, max(TRAINING_PER_LIST * self.lists, TRAINING_VECTORS))
        return 0 if self.code == "Flat" else min(rows, TRAINING_VECTORS)

    @property
    def default_probes(self) -> int:
        """Return the number of lists that a search visits by default."""
        return max(16, self.lists // 8)

    def make(self, dimension: int, ef_construction: int = EF_CONSTRUCTION) -> Any:
        """Make an empty faiss index by inner product."""
        import faiss

        # "np": without ordering the codes for Hamming distances, which takes minutes and is not needed.
        name = self.name + ("np" if self.code == "PQ" else "")
        index: Any = faiss.index_factory(dimension, name, faiss.METRIC_INNER_PRODUCT)
        if self.family == "HNSW":
            index.hnsw.efConstruction = ef_construction
        return index

    def reserve(self, index: Any, rows: int) -> None:
        """Reserve the memory of all vectors in an empty index of this type.

        Growing arrays would be copied, which needs twice the memory for a moment. Not for the lists of an IVF index,
        which are small and of unknown lengths.
        """
        import faiss

        if self.family == "IVF":
            return
        storage: Any = faiss.downcast_index(index.storage) if self.family == "HNSW" else index
        arrays = [(storage.codes, rows * storage.code_size)]
        if self.family == "HNSW":
            # Levels are random: 1 % more than the mean, and some for a small graph.
            links = math.ceil(1.01 * rows * self._mean_links) + 100 * self.links
            arrays += [(index.hnsw.neighbors, links), (index.hnsw.offsets, rows + 1), (index.hnsw.levels, rows)]
        for array, size in arrays:
            old = array.size()
            array.resize(size)
            array.resize(old)  # the memory stays


def parse_type(name: str) -> IndexType:
    """Parse the name of a type: ``Flat``, ``HNSW[M][,SQ8]`` or ``IVF[LISTS],Flat|SQ8|PQ<parts>``, in any case.

    Raises:
        SpearError: the name is unknown.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise SpearError(f"type {name!r} is not valid: give one like {' '.join(EXAMPLES)}.")
    flat, links, coded, lists, code, parts = found.groups()
    if flat:
        return IndexType("Flat")
    if code is None:
        if not 4 <= int(links or LINKS) <= 512:
            raise SpearError(f"type {name!r}: give 4 to 512 links, 32 or 64 as a rule.")
        return IndexType("HNSW", "SQ8" if (coded or "").lower() == "sq8" else "Flat", int(links or LINKS))
    if "0" in {str(int(number)) for number in (lists, parts) if number}:
        raise SpearError(f"type {name!r}: give at least 1.")
    code = "PQ" if parts else {"flat": "Flat", "sq8": "SQ8"}[code.lower()]
    return IndexType("IVF", code, lists=int(lists or 0), parts=int(parts or 0))


@dataclass(frozen=True)
class Estimate:
    """Memory, disk and time of one type of index."""

    type: IndexType
    index_bytes: int
    """Size of the file, and the memory of a search that touches all of it; processes share it."""
    build_bytes: int
    """Memory at the peak of the build."""
    disk_bytes: int
    """Disk at the peak of the build: the index, and the vectors in float16."""
    build_seconds: float
    """CPU time of training and adding, without encoding."""


def estimate_index(kind: IndexType, rows: int, dimension: int) -> Estimate:
    """Estimate the memory, disk and time of an index of ``rows`` vectors.

    Raises:
        SpearError: the type does not fit the corpus or the vectors.
    """
    kind = kind.resolve(rows, dimension)
    size = kind.index_bytes(rows, dimension)
    sample = 4 * dimension * kind.training_vectors(rows)
    seconds = 0.0
    if kind.family == "HNSW":
        factor = (rows / LINK_ROWS) ** LINK_ROWS_POWER * (dimension / LINK_DIMENSION) ** LINK_DIMENSION_POWER
        seconds = rows * LINK_SECONDS * factor
    elif kind.family == "IVF":
        compared = rows + TRAINING_ROUNDS * kind.training_vectors(rows)
        seconds = compared * kind.lists * dimension * COMPARE_SECONDS
    return Estimate(
        type=kind,
        index_bytes=round(size),
        build_bytes=round(max(GROWTH[kind.family] * size, size + sample) + PROCESS_BYTES),
        disk_bytes=round(size + 2 * dimension * rows * (2 if kind.needs_exact else 1)),
        build_seconds=seconds,
    )


def estimate_encoding(dimension: int) -> float:
    """Estimate the CPU seconds for one passage of 100 words: a guess from the dimension of the model."""
    return ENCODE_SECONDS * (dimension / LINK_DIMENSION) ** 3


def find_memory() -> int:
    """Return the bytes of memory that a build may use: nine tenths of what is free."""
    return int(SHARE * find_free_memory())


def require_memory(kind: IndexType, rows: int, dimension: int, memory: int | None = None) -> None:
    """Refuse a build that would not fit into memory.

    Raises:
        SpearError: it would not fit; the message has the estimate and names a type that fits.
    """
    limit = find_memory() if memory is None else memory
    needed = estimate_index(kind, rows, dimension).build_bytes
    if needed <= limit:
        return
    smaller = [
        other.name
        for other in map(parse_type, PLANNED)
        if is_possible(other, rows, dimension) and estimate_index(other, rows, dimension).build_bytes <= limit
    ]
    advice = f"take --type {smaller[0]}" if smaller else "take --type bm25"
    raise SpearError(
        f"{kind.name} of {rows:,} vectors of {dimension} dimensions needs {format_bytes(needed)} of memory to build, "
        f"and {format_bytes(limit)} may be used: {advice}, or give more with --memory."
    )


def choose_type(rows: int, dimension: int, memory: int | None = None) -> IndexType:
    """Choose the type for a corpus: every vector compared if they are few, else a graph, coarser if needed.

    Raises:
        SpearError: no graph fits into memory.
    """
    if rows <= FLAT_ROWS:
        return parse_type("Flat")
    limit = find_memory() if memory is None else memory
    exact, coarse = parse_type("HNSW"), parse_type("HNSW,SQ8")
    if estimate_index(exact, rows, dimension).build_bytes <= limit:
        return exact
    require_memory(coarse, rows, dimension, limit)
    return coarse


def is_possible(kind: IndexType, rows: int, dimension: int) -> bool:
    """Return whether the type fits the corpus and the vectors."""
    try:
        kind.resolve(rows, dimension)
    except SpearError:
        return False
    return True


# ---------------------------------------------------------------- searching


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
