"""Types of vector indexes: their names, their sizes, and making them with faiss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from spear_envs.core.errors import SpearError

EXAMPLES = ("flat", "hnsw", "hnsw64", "hnsw-sq8", "ivf-flat", "ivf4096-sq8", "ivf-pq96")
LINKS = 32
EF_CONSTRUCTION = 200
MIN_LISTS, MAX_LISTS = 16, 1 << 16
TRAINING_PER_LIST = 64
"""Training vectors for each list of an IVF index; faiss warns below 39."""
TRAINING_VECTORS = 100_000
"""Training vectors for codes."""
_NAME = re.compile(r"flat|hnsw(?P<links>\d+)?(?P<coded>-sq8)?|ivf(?P<lists>\d+)?-(?P<code>flat|sq8|pq(?P<parts>\d+))")


class Family(Enum):
    """How the vectors to compare with are found."""

    FLAT = "flat"
    """All of them."""
    HNSW = "hnsw"
    """By walking a graph of near vectors."""
    IVF = "ivf"
    """Those of the lists whose centres are nearest."""


class Code(Enum):
    """How a vector is stored in the index."""

    FLAT = "flat"
    """As float32."""
    SQ8 = "sq8"
    """A byte for each dimension."""
    PQ = "pq"
    """A byte for each of some parts: far smaller, but too coarse without reranking by exact vectors."""


@dataclass(frozen=True)
class IndexType:
    """One type of index."""

    family: Family
    code: Code = Code.FLAT
    links: int = LINKS
    """M of an HNSW graph: links of a vector on each level, twice as many on the lowest."""
    lists: int = 0
    """Of an IVF index; 0 until :meth:`resolve` has chosen."""
    parts: int = 0
    """Of a product quantiser."""

    @property
    def name(self) -> str:
        """As :func:`parse_type` reads it."""
        code = f"pq{self.parts}" if self.code is Code.PQ else self.code.value
        if self.family is Family.FLAT:
            return "flat"
        if self.family is Family.HNSW:
            return f"hnsw{self.links}" + ("" if self.code is Code.FLAT else f"-{code}")
        return f"ivf{self.lists or ''}-{code}"

    def resolve(self, rows: int, dimension: int) -> IndexType:
        """The type with its number of lists: some 4 √rows, a power of two.

        Raises:
            SpearError: the type does not fit the corpus or the vectors.
        """
        if self.code is Code.PQ and dimension % self.parts:
            raise SpearError(f"{self.name}: {dimension} dimensions cannot be cut into {self.parts} equal parts.")
        if self.family is not Family.IVF:
            return self
        lists = self.lists or min(max(2 ** round(math.log2(4 * math.sqrt(rows))), MIN_LISTS), MAX_LISTS)
        if rows < lists:
            raise SpearError(f"ivf{lists}: a corpus of {rows:,} documents has fewer than lists; take 'flat'.")
        return replace(self, lists=lists)

    @property
    def needs_exact(self) -> bool:
        """Whether exact vectors are kept for reranking."""
        return self.code is Code.PQ

    @property
    def _mean_links(self) -> float:
        """Mean links of a vector in an HNSW graph: on the lowest level, and on higher ones, which few reach."""
        return 2 * self.links + self.links / (self.links - 1)

    def vector_bytes(self, dimension: int) -> float:
        """Bytes of the index for each vector, checked against files of faiss."""
        coded = {Code.FLAT: 4 * dimension, Code.SQ8: dimension, Code.PQ: self.parts}[self.code]
        if self.family is Family.HNSW:
            # Links, the highest level, and where the links begin.
            return coded + 4 * self._mean_links + 12
        return coded + (8 if self.family is Family.IVF else 0)

    def index_bytes(self, rows: int, dimension: int) -> float:
        """Bytes of an index of ``rows`` vectors."""
        centres = 4 * dimension * (self.lists + (256 if self.code is Code.PQ else 0))
        return rows * self.vector_bytes(dimension) + centres

    def training_vectors(self, rows: int) -> int:
        """Number of training vectors; may be 0."""
        if self.family is Family.IVF:
            return min(rows, max(TRAINING_PER_LIST * self.lists, TRAINING_VECTORS))
        return 0 if self.code is Code.FLAT else min(rows, TRAINING_VECTORS)

    @property
    def default_probes(self) -> int:
        """Lists that a search visits by default."""
        return max(16, self.lists // 8)

    def make(self, dimension: int, ef_construction: int = EF_CONSTRUCTION) -> Any:
        """Make an empty faiss index by inner product."""
        import faiss

        quantizers: Any = faiss.ScalarQuantizer
        metric = faiss.METRIC_INNER_PRODUCT
        if self.family is Family.FLAT:
            return faiss.IndexFlatIP(dimension)
        if self.family is Family.IVF:
            # "np": without ordering the codes for Hamming distances, which takes minutes and is not needed.
            code = f"PQ{self.parts}np" if self.code is Code.PQ else {"flat": "Flat", "sq8": "SQ8"}[self.code.value]
            return faiss.index_factory(dimension, f"IVF{self.lists},{code}", metric)
        index: Any
        if self.code is Code.FLAT:
            index = faiss.IndexHNSWFlat(dimension, self.links, metric)
        else:
            index = faiss.IndexHNSWSQ(dimension, quantizers.QT_8bit, self.links, metric)
        index.hnsw.efConstruction = ef_construction
        return index

    def reserve(self, index: Any, rows: int) -> None:
        """Reserve the memory of all vectors in an empty index of this type.

        Growing arrays would be copied, which needs twice the memory for a moment. Not for the lists of an IVF index,
        which are small and of unknown lengths.
        """
        import faiss

        if self.family is Family.IVF:
            return
        storage: Any = faiss.downcast_index(index.storage) if self.family is Family.HNSW else index
        arrays = [(storage.codes, rows * storage.code_size)]
        if self.family is Family.HNSW:
            # Levels are random: 1 % more than the mean, and some for a small graph.
            links = math.ceil(1.01 * rows * self._mean_links) + 100 * self.links
            arrays += [(index.hnsw.neighbors, links), (index.hnsw.offsets, rows + 1), (index.hnsw.levels, rows)]
        for array, size in arrays:
            old = array.size()
            array.resize(size)
            array.resize(old)  # the memory stays


def parse_type(name: str) -> IndexType:
    """Parse the name of a type: ``flat``, ``hnsw[M][-sq8]``, ``ivf[LISTS]-flat|sq8|pqPARTS``.

    Raises:
        SpearError: the name is unknown.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise SpearError(f"type {name!r} is not valid: give one like {', '.join(EXAMPLES)}.")
    links, lists, parts = (int(found[group] or 0) for group in ("links", "lists", "parts"))
    if name == "flat":
        return IndexType(Family.FLAT)
    if name.startswith("hnsw"):
        if found["links"] and not 4 <= links <= 512:
            raise SpearError(f"type {name!r}: give 4 to 512 links, 32 or 64 as a rule.")
        return IndexType(Family.HNSW, Code.SQ8 if found["coded"] else Code.FLAT, links or LINKS)
    if (found["lists"] and lists < 1) or (found["parts"] and parts < 1):
        raise SpearError(f"type {name!r}: give at least 1.")
    return IndexType(Family.IVF, Code("pq" if parts else found["code"]), lists=lists, parts=parts)
