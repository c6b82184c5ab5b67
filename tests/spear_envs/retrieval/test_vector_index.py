"""Vector indexes of every type over random vectors: mapped, memory taken once, hits that do not depend on k."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.vectors import RERANKED, IndexType, VectorIndex, parse_type, read_type

faiss = pytest.importorskip("faiss", reason="the extra 'search' is not installed")

ROWS, DIMENSION = 600, 16
NAMES = ("Flat", "HNSW8", "HNSW8,SQ8", "IVF4,Flat", "IVF4,SQ8", "IVF4,PQ4")
Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    """Whole numbers below 4, so that many are equal, or equally near, and arithmetic is exact."""
    return np.random.default_rng(0).integers(0, 4, (ROWS, DIMENSION)).astype(np.float32)


def build(kind: IndexType, vectors: Vectors, *, reserved: bool = True) -> Any:
    faiss.omp_set_num_threads(1)
    index = kind.make(vectors.shape[1], 40)
    if reserved:
        kind.reserve(index, len(vectors))
    if kind.training_vectors(len(vectors)):
        index.train(vectors)
    for part in np.array_split(vectors, 7):
        index.add(part)
    return index


def write(name: str, vectors: Vectors, folder: Path, **settings: Any) -> VectorIndex:
    kind = parse_type(name).resolve(*vectors.shape)
    faiss.write_index(build(kind, vectors), str(folder / "index"))
    exact = folder / "exact"
    vectors.astype("<f2").tofile(exact)
    return VectorIndex(folder / "index", kind, exact=exact if kind.needs_exact else None, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_memory_taken_at_once_changes_no_byte(name: str, vectors: Vectors) -> None:
    kind = parse_type(name)
    plain, reserved = (faiss.serialize_index(build(kind, vectors, reserved=on)) for on in (False, True))
    np.testing.assert_array_equal(plain, reserved)


@pytest.mark.parametrize("name", NAMES)
def test_first_hits_do_not_depend_on_k(name: str, vectors: Vectors, tmp_path: Path) -> None:
    settings = {"ef_search": 20} if name.startswith("HNSW") else {}
    index = write(name, vectors, tmp_path, **settings)
    queries = vectors[:40] + np.float32(0.5)
    many = index.find(queries, 100)
    for hits in many:
        rows = [row for row, _ in hits]
        assert len(set(rows)) == len(rows) and min(rows) >= 0
        assert len(rows) == (20 if settings else 100)
        assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))
    for k in (1, 3, 10, 90):
        assert [hits[:k] for hits in many] == index.find(queries, k)
    assert index.reranked == (RERANKED if "PQ" in name else 0)


def test_lists_that_are_not_visited_leave_no_holes(vectors: Vectors, tmp_path: Path) -> None:
    for hits in write("IVF4,Flat", vectors, tmp_path, nprobe=1).find(vectors[:20], ROWS):
        rows = [row for row, _ in hits]
        assert 0 < len(rows) < ROWS and min(rows) >= 0


def test_ties_go_to_the_lower_row(vectors: Vectors, tmp_path: Path) -> None:
    index = write("Flat", vectors, tmp_path)
    exact = vectors[:50] @ vectors.T
    for scores, hits in zip(exact, index.find(vectors[:50], 10), strict=True):
        assert hits == [(int(row), float(scores[row])) for row in np.lexsort((np.arange(ROWS), -scores))[:10]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", NAMES)
def test_files_are_mapped(name: str, vectors: Vectors, tmp_path: Path) -> None:
    index = write(name, vectors, tmp_path)
    assert index.rows == ROWS
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(tmp_path / "index") in mapped
    assert (str(tmp_path / "exact") in mapped) == ("PQ" in name)


@pytest.mark.parametrize("name", NAMES)
def test_types_are_told_apart(name: str, vectors: Vectors, tmp_path: Path) -> None:
    kind = write(name, vectors, tmp_path).type
    assert read_type(tmp_path / "index") == kind
    for other in NAMES:
        if other != name:
            with pytest.raises(SpearError, match=f"is not an index of type {other}"):
                VectorIndex(tmp_path / "index", parse_type(other))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lists_are_not_read_ahead_by_threads(vectors: Vectors, tmp_path: Path) -> None:
    index = write("IVF4,Flat", vectors, tmp_path)
    before = len(os.listdir("/proc/self/task"))
    index.find(vectors[:50], 5)
    assert len(os.listdir("/proc/self/task")) < before + 16  # faiss would start 32


def test_exact_vectors_must_be_as_many(vectors: Vectors, tmp_path: Path) -> None:
    write("IVF4,PQ4", vectors, tmp_path)
    (tmp_path / "exact").write_bytes(b"1234")
    with pytest.raises(SpearError, match="does not hold 600 vectors of 16 dimensions"):
        VectorIndex(tmp_path / "index", parse_type("IVF4,PQ4"), exact=tmp_path / "exact")


def test_codes_are_not_ordered_for_a_search_that_is_not_made() -> None:
    assert not parse_type("IVF4,PQ4").make(DIMENSION).do_polysemous_training


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_can_search(vectors: Vectors, tmp_path: Path) -> None:
    index = write("HNSW8", vectors, tmp_path)
    expected = index.find(vectors[:5], 3)
    child = os.fork()
    if child == 0:
        os._exit(0 if index.find(vectors[:5], 3) == expected else 1)
    import signal
    import threading

    timer = threading.Timer(30, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert os.waitstatus_to_exitcode(status) == 0
