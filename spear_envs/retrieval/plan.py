"""How much memory, disk and time an index takes, before it is built.

Sizes follow from the types of index (:mod:`spear_envs.retrieval.kinds`). Times are extrapolated from measurements on
one core and give only an order of magnitude; encoding can be measured on the spot.
"""

from __future__ import annotations

from dataclasses import dataclass

from spear_envs.core.errors import SpearError
from spear_envs.core.memory import find_free_memory
from spear_envs.data.files import format_bytes
from spear_envs.retrieval.kinds import Family, IndexType, parse_type

WIKI18_ROWS, WIKI18_DIMENSION = 21_015_324, 768
"""Of the paper: passages, and the vectors of E5-base."""
PLANNED = ("flat", "hnsw", "hnsw64", "hnsw-sq8", "ivf-sq8", "ivf-pq96")
FLAT_ROWS = 50_000
"""Up to so many documents every vector is compared: a millisecond or two a query."""
PROCESS_BYTES = 500 * 10**6
"""Python, faiss, ONNX Runtime and what they keep for reuse."""
SHARE = 0.9
"""Of the memory that is free: the rest is for others."""
LINK_SECONDS = 0.98e-3
"""CPU time to link a vector of 384 dimensions into a graph while it grows to 100,000, efConstruction 200, on a busy
2026 server core (`benchmarks/search_vectors.py`). Codes of a byte take as long, and so do 64 links."""
LINK_ROWS, LINK_DIMENSION = 100_000, 384
LINK_ROWS_POWER, LINK_DIMENSION_POWER = 0.28, 1.2
"""Growth of the time: fitted to 0.43 ms for 8,000 vectors and 1.53 ms for 500,000, and to 2.3 times as much at 768
dimensions. Beyond that it is an extrapolation."""
COMPARE_SECONDS = 1e-10
"""For one dimension of one comparison with a list's centre."""
TRAINING_ROUNDS = 11
"""Of k-means, and one to assign a vector at last."""
ENCODE_SECONDS = 0.035
"""CPU time for one passage of 100 words by MiniLM (384 dimensions), float32 on ONNX Runtime: measured with 2,500. By
other models it is assumed to grow with the cube of the dimension: eight times for E5-base, which has twice the layers
and twice the width."""
GROWTH = {Family.FLAT: 1.02, Family.HNSW: 1.02, Family.IVF: 1.35}
"""Greatest memory of an index that grows, over its size at last: measured 1.01, 1.01 and 1.31 with 120,000 vectors of
768 dimensions. Flat and HNSW take theirs at once; the lists of IVF grow by doubling, each by itself."""


@dataclass(frozen=True)
class Estimate:
    """What one type of index takes."""

    type: IndexType
    index_bytes: int
    """The file, and the memory of a search that touches all of it; processes share it."""
    build_bytes: int
    """Memory at the peak of the build."""
    disk_bytes: int
    """At the peak of the build: the index, and the vectors in float16."""
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
    if kind.family is Family.HNSW:
        factor = (rows / LINK_ROWS) ** LINK_ROWS_POWER * (dimension / LINK_DIMENSION) ** LINK_DIMENSION_POWER
        seconds = rows * LINK_SECONDS * factor
    elif kind.family is Family.IVF:
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
        return parse_type("flat")
    limit = find_memory() if memory is None else memory
    exact, coarse = parse_type("hnsw"), parse_type("hnsw-sq8")
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
