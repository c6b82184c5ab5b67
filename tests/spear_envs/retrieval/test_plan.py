"""Estimates against the table of measured sizes, and against files that faiss wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.vectors import (
    PLANNED,
    IndexType,
    choose_type,
    estimate_index,
    find_memory,
    is_possible,
    parse_type,
    require_memory,
)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("flat", "Flat"),
        ("HNSW", "HNSW32"),
        ("HNSW8", "HNSW8"),
        ("hnsw64-sq8", "HNSW64,SQ8"),
        ("HNSW32_SQ8", "HNSW32,SQ8"),
        ("IVF,Flat", "IVF,Flat"),
        ("ivf16-sq8", "IVF16,SQ8"),
        ("IVF1024,PQ96", "IVF1024,PQ96"),
    ],
)
def test_names_are_those_of_faiss_in_any_case(name: str, written: str) -> None:
    kind = parse_type(name)
    assert kind.name == written and parse_type(written) == kind


@pytest.mark.parametrize(
    "name",
    ["", "HNSW1", "hnsw0", "HNSW9999", "HNSW,PQ8", "ivf", "IVF,SQ4", "IVF0,Flat", "IVF,PQ0", "Flat,SQ8", "x"],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(SpearError, match=r"HNSW32,SQ8|at least 1|links"):
        parse_type(name)


@given(st.text(st.sampled_from("flathnswiqp,-0123456789")))
def test_any_name_is_a_type_or_a_clear_error(name: str) -> None:
    try:
        kind = parse_type(name)
    except SpearError:
        return
    assert parse_type(kind.name) == kind


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("Flat", 64.6),
        ("HNSW", 70.3),
        ("HNSW64", 75.7),
        ("HNSW,SQ8", 21.8),
        ("IVF,SQ8", 16.3),
        ("IVF,PQ96", 2.2),
    ],
)
def test_sizes_at_wiki18(name: str, gigabytes: float) -> None:
    found = estimate_index(parse_type(name), 21_015_324, 768).index_bytes / 1e9
    assert found == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.parametrize("name", ["Flat", "HNSW", "HNSW,SQ8", "IVF64,Flat", "IVF64,SQ8", "IVF16,PQ8"])
def test_sizes_of_files(name: str, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss", reason="the extra 'search' is not installed")
    rows, dimension = 3_000, 64
    vectors = np.random.default_rng(0).standard_normal((rows, dimension)).astype(np.float32)
    kind = parse_type(name).resolve(rows, dimension)
    index = kind.make(dimension, 20)
    if kind.training_vectors(rows):
        index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index"))
    assert (tmp_path / "index").stat().st_size == pytest.approx(kind.index_bytes(rows, dimension), rel=0.02)


def test_type_that_fits_is_chosen() -> None:
    assert choose_type(50_000, 384, 10**9).name == "Flat"
    assert choose_type(21_015_324, 768, 200 * 10**9).name == "HNSW32"
    assert choose_type(21_015_324, 768, 64 * 10**9).name == "HNSW32,SQ8"
    with pytest.raises(SpearError, match="--type IVF"):
        choose_type(21_015_324, 768, 10**10)
    with pytest.raises(SpearError, match="--type bm25"):
        choose_type(21_015_324, 768, 10**9)
    assert find_memory() > 0


def test_refusal_says_what_is_needed() -> None:
    require_memory(parse_type("HNSW,SQ8"), 1_000_000, 384, 2 * 10**9)
    with pytest.raises(SpearError, match=r"HNSW32 of 1,000,000 vectors .* needs 2\.3 GB .* 2\.0 GB may be used"):
        require_memory(parse_type("HNSW"), 1_000_000, 384, 2 * 10**9)


@given(st.sampled_from(PLANNED), st.integers(20_000, 10**8), st.sampled_from([96, 384, 768, 1_536]))
def test_estimates_grow_with_the_corpus(name: str, rows: int, dimension: int) -> None:
    kind = parse_type(name)
    small, large = estimate_index(kind, rows, dimension), estimate_index(kind, 2 * rows, dimension)
    assert 0 < small.index_bytes < large.index_bytes
    assert small.index_bytes < small.build_bytes < large.build_bytes
    assert small.disk_bytes < large.disk_bytes and small.build_seconds <= large.build_seconds


def test_lists_follow_the_rows() -> None:
    lists = [parse_type("IVF,SQ8").resolve(rows, 384).lists for rows in (100, 10_000, 10**6, 21_015_324, 10**10)]
    assert lists == [32, 512, 4_096, 16_384, 65_536]
    assert not is_possible(parse_type("IVF,SQ8"), 8, 384)
    assert IndexType("IVF", "SQ8", lists=512).default_probes == 64
