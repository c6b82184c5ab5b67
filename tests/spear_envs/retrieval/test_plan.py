"""Estimates against the table of measured sizes, and against files that faiss wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.data.progress import format_seconds
from spear_envs.retrieval.kinds import Code, Family, IndexType, parse_type
from spear_envs.retrieval.plan import PLANNED, choose_type, estimate_index, find_memory, is_possible, require_memory


@pytest.mark.parametrize("name", ["flat", "hnsw", "hnsw8", "hnsw64-sq8", "ivf-flat", "ivf16-sq8", "ivf1024-pq96"])
def test_names_are_read_and_written(name: str) -> None:
    kind = parse_type(name)
    assert parse_type(kind.name) == kind
    assert kind.name == {"hnsw": "hnsw32"}.get(name, name)


@pytest.mark.parametrize(
    "name",
    ["", "HNSW", "hnsw1", "hnsw0", "hnsw9999", "hnsw-pq8", "ivf", "ivf-sq4", "ivf0-flat", "ivf-pq0", "flat-sq8", "x"],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(SpearError, match=r"hnsw-sq8|at least 1|links"):
        parse_type(name)


@given(st.text(st.sampled_from("flathnswiqp-0123456789")))
def test_any_name_is_a_type_or_a_clear_error(name: str) -> None:
    try:
        kind = parse_type(name)
    except SpearError:
        return
    assert parse_type(kind.name) == kind


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("flat", 64.6),
        ("hnsw", 70.3),
        ("hnsw64", 75.7),
        ("hnsw-sq8", 21.8),
        ("ivf-sq8", 16.3),
        ("ivf-pq96", 2.2),
    ],
)
def test_sizes_at_wiki18(name: str, gigabytes: float) -> None:
    found = estimate_index(parse_type(name), 21_015_324, 768).index_bytes / 1e9
    assert found == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.parametrize("name", ["flat", "hnsw", "hnsw-sq8", "ivf64-flat", "ivf64-sq8", "ivf16-pq8"])
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
    assert choose_type(50_000, 384, 10**9).name == "flat"
    assert choose_type(21_015_324, 768, 200 * 10**9).name == "hnsw32"
    assert choose_type(21_015_324, 768, 64 * 10**9).name == "hnsw32-sq8"
    with pytest.raises(SpearError, match="--type ivf-pq96"):
        choose_type(21_015_324, 768, 10**10)
    with pytest.raises(SpearError, match="--type bm25"):
        choose_type(21_015_324, 768, 10**9)
    assert find_memory() > 0


def test_refusal_says_what_is_needed() -> None:
    require_memory(parse_type("hnsw-sq8"), 1_000_000, 384, 2 * 10**9)
    with pytest.raises(SpearError, match=r"hnsw32 of 1,000,000 vectors .* needs 2\.3 GB .* 2\.0 GB may be used"):
        require_memory(parse_type("hnsw"), 1_000_000, 384, 2 * 10**9)


@given(st.sampled_from(PLANNED), st.integers(20_000, 10**8), st.sampled_from([96, 384, 768, 1_536]))
def test_estimates_grow_with_the_corpus(name: str, rows: int, dimension: int) -> None:
    kind = parse_type(name)
    small, large = estimate_index(kind, rows, dimension), estimate_index(kind, 2 * rows, dimension)
    assert 0 < small.index_bytes < large.index_bytes
    assert small.index_bytes < small.build_bytes < large.build_bytes
    assert small.disk_bytes < large.disk_bytes and small.build_seconds <= large.build_seconds


def test_lists_follow_the_rows() -> None:
    lists = [parse_type("ivf-sq8").resolve(rows, 384).lists for rows in (100, 10_000, 10**6, 21_015_324, 10**10)]
    assert lists == [32, 512, 4_096, 16_384, 65_536]
    assert not is_possible(parse_type("ivf-sq8"), 8, 384)
    assert IndexType(Family.IVF, Code.SQ8, lists=512).default_probes == 64


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (120, "2.0 min"), (3_000, "50 min"), (7_200, "2.0 h"), (10**6, "11.6 days")],
)
def test_times_are_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
