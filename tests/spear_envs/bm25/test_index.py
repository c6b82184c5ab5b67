"""Searching: Lucene's own results where they are at hand, ties, and queries of any kind."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.bm25.build import build_index
from spear_envs.bm25.index import MAX_TERMS, SearchIndex
from spear_envs.bm25.packing import pack_postings
from spear_envs.bm25.postings import make_postings
from spear_envs.bm25.ranking import rank_with_numpy
from spear_envs.core.errors import SpearError
from spear_envs.webshop.products import read_product


@pytest.fixture(scope="module")
def products(shared: Path) -> tuple[list[str], list[str]]:
    """ASINs and texts of the 1,000 products, in ASIN order."""
    path = shared / "data" / "webshop" / "items_shuffle_1000.json.xz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    with lzma.open(path) as file:
        found = sorted((read_product(record) for record in json.load(file)), key=lambda product: product.asin)
    return [product.asin for product in found], [product.index_text for product in found]


@pytest.fixture(scope="module")
def cases(shared: Path) -> list[dict[str, object]]:
    with lzma.open(shared / "golden" / "webshop" / "search_cases.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("way", ["memory", "numpy", "disk"])
def test_lucenes_own_results(
    way: str, products: tuple[list[str], list[str]], cases: list[dict[str, object]], tmp_path: Path
) -> None:
    asins, texts = products
    if way == "disk":
        build_index(texts, tmp_path / "index", processes=1)
        index = SearchIndex.open(tmp_path / "index")
    elif way == "numpy":
        index = SearchIndex(pack_postings(make_postings(texts)), rank_with_numpy)
    else:
        index = SearchIndex.in_memory(texts)
    assert len(index) == 1_000
    assert len(cases) == 300
    wrong = [case["query"] for case in cases if [asins[i] for i in index.search(str(case["query"]))] != case["top"]]
    assert wrong == []


TEXTS = ["red dress", "blue dress", "red shirt", "red dress", "", "the"]


@pytest.fixture(scope="module")
def index() -> SearchIndex:
    return SearchIndex.in_memory(TEXTS)


def test_k_cuts(index: SearchIndex) -> None:
    assert index.search("red dress", 2) == [0, 3]
    assert index.search("red dress", 10**9) == [0, 3, 1, 2]


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_an_error(index: SearchIndex, k: int) -> None:
    with pytest.raises(SpearError, match="at least one"):
        index.search("red", k)


@pytest.mark.parametrize("query", ["", " ", "the", "green", "[]()", "\ud800", "\x00", "¯\\_(ツ)_/¯"])
def test_queries_that_find_nothing(index: SearchIndex, query: str) -> None:
    assert index.search(query) == []


@given(st.text(st.characters(), max_size=80))
def test_any_query_has_an_answer(query: str) -> None:
    index = SearchIndex.in_memory(TEXTS)
    assert set(index.search(query)) <= set(range(len(TEXTS)))
    assert index.search(f"{query} dress")[:1] != []


@pytest.mark.parametrize("query", ["red " * 2_500, "r" * 10_000, "é" * 10_000, "漢" * 10_000, "[" * 10_000])
def test_long_queries(index: SearchIndex, query: str) -> None:
    assert index.search(query) in ([], [0, 2, 3])


def test_only_the_first_1024_terms_count(index: SearchIndex) -> None:
    others = [f"x{i}" for i in range(MAX_TERMS)]
    assert index.search(" ".join([*others, "red"])) == []
    assert index.search(" ".join([*others[1:], "red", "red", "blue"])) == [0, 2, 3]


def test_repeated_words_weigh_more(index: SearchIndex) -> None:
    assert index.search("blue red red red red")[0] != 1
    assert index.search("blue red")[0] == 1


@pytest.mark.parametrize("texts", [[], [""], ["the", "of"]])
def test_nothing_to_search(texts: list[str]) -> None:
    index = SearchIndex.in_memory(texts)
    assert len(index) == len(texts)
    assert index.search("red") == []
