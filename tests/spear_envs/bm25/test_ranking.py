"""Both loops against a scorer that follows the formula one document at a time."""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.bm25.analysis import analyze
from spear_envs.bm25.index import SearchIndex
from spear_envs.bm25.postings import QUANTIZED_LENGTHS, Postings, make_postings, pack_terms, quantize_lengths
from spear_envs.bm25.ranking import Rank, choose_rank, rank_with_numpy

compiled = choose_rank()
needs_compiled = pytest.mark.skipif(compiled is rank_with_numpy, reason="the extension module was not built")
LOOPS = [pytest.param(rank_with_numpy, id="numpy"), pytest.param(compiled, id="compiled", marks=needs_compiled)]

WORDS = st.sampled_from(
    ["red", "blue", "green", "dress", "shirt", "shirts", "large", "small", "the", "with", "4k", "cotton"]
)
TEXTS = st.lists(st.lists(WORDS, max_size=60).map(" ".join), max_size=30)
QUERIES = st.lists(WORDS, max_size=8).map(" ".join)


def round_float(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def rank_by_formula(texts: list[str], query: str, k: int) -> list[tuple[int, float]]:
    """Lucene's ranking in plain Python: float64 operations, each rounded to float32 (which is exact for + - * /)."""
    r = round_float
    documents = [Counter(analyze(text)) for text in texts]
    filled = sum(map(bool, documents))
    if not filled:
        return []
    k1, b, one = r(0.9), r(0.4), 1.0
    average = r(sum(map(Counter.total, documents)) / filled)
    scores = []
    for number, counts in enumerate(documents):
        length = float(QUANTIZED_LENGTHS[quantize_lengths(np.array([counts.total()]))[0]])
        factor = r(one / r(k1 * r(r(one - b) + r(r(b * length) / average))))
        total, found = 0.0, False
        for term, times in Counter(analyze(query)).items():
            frequency = sum(term in other for other in documents)
            if term in counts:
                idf = r(math.log(1 + (filled - frequency + 0.5) / (frequency + 0.5)))
                weight = r(times * idf)
                total += r(weight - r(weight / r(one + r(counts[term] * factor))))
                found = True
        if found:
            scores.append((-r(total), number))
    return [(number, -score) for score, number in sorted(scores)[:k]]


@pytest.mark.parametrize("loop", LOOPS)
@given(TEXTS, QUERIES, st.integers(1, 40))
def test_order_and_scores_follow_the_formula(loop: Rank, texts: list[str], query: str, k: int) -> None:
    assert SearchIndex(make_postings(texts), loop).search_scored(query, k) == rank_by_formula(texts, query, k)


def draw_postings(seed: int, documents: int) -> Postings:
    """A random index of single-letter terms: some in nearly every document, some in a handful, few distinct scores."""
    rng = np.random.default_rng(seed)
    held, counts = [], []
    shares = [0.9, 0.5, 0.2, 0.01, 0.001, 3 / documents, 1.0]
    for share in shares:
        found = np.flatnonzero(rng.random(documents) < share)
        held.append(found)
        counts.append(rng.choice([1, 1, 1, 2, 3, 8, 9, 500, 65_535], len(found)))
    lengths = rng.choice([1, 5, 30, 90, 100, 4_000], documents)
    term_bytes, term_ends = pack_terms([bytes([ord("b") + i]) for i in range(len(shares))])
    return Postings(
        term_bytes=term_bytes,
        term_ends=term_ends,
        starts=np.concatenate([[0], np.cumsum([len(h) for h in held])]).astype(np.int64),
        documents=np.concatenate(held).astype(np.uint32),
        counts=np.concatenate(counts).astype(np.uint16),
        norms=quantize_lengths(lengths),
        terms_total=int(lengths.sum()),
        filled=documents,
    )


@needs_compiled
@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([10, 4_095, 4_096, 4_097, 60_000]),
    st.lists(st.sampled_from("bcdefghq"), min_size=1, max_size=10).map(" ".join),
    st.sampled_from([1, 2, 50, 1_000, 10**6]),
)
def test_loops_agree_over_many_windows_and_ties(seed: int, documents: int, query: str, k: int) -> None:
    postings = draw_postings(seed, documents)
    expected = SearchIndex(postings, rank_with_numpy).search_scored(query, k)
    assert SearchIndex(postings, compiled).search_scored(query, k) == expected


@needs_compiled
def test_threads_do_not_meet() -> None:
    index = SearchIndex(draw_postings(1, 60_000), compiled)
    queries = ["b c", "d e f", "h", "c d e q", "g f"] * 20
    expected = [index.search(query) for query in queries]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(index.search, queries)) == expected


def make_arguments(**changes: Any) -> list[Any]:
    """Arguments of a loop for three documents and one term, some of them changed."""
    arguments: dict[str, Any] = {
        "documents": np.array([0, 1, 2], np.uint32),
        "counts": np.array([1, 1, 1], np.uint16),
        "norms": np.array([1, 2, 3], np.uint8),
        "factors": np.ones(256, np.float32),
        "spans": np.array([[0, 3]], np.int64),
        "weights": np.array([1], np.float32),
        "k": 50,
    }
    return list((arguments | changes).values())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("documents", [[0, 1, 3], [0, 1, 2**32 - 1], [2, 0, 1]])
def test_numbers_that_no_index_has_are_found(loop: Rank, documents: list[int]) -> None:
    with pytest.raises(ValueError, match="not ascending"):
        loop(*make_arguments(documents=np.array(documents, np.uint32)))


@needs_compiled
@pytest.mark.parametrize(
    "change",
    [
        {"counts": np.ones(2, np.uint16)},
        {"documents": np.zeros(7, np.uint16)},
        {"factors": np.ones(255, np.float32)},
        {"weights": np.ones(2, np.float32)},
        {"spans": np.zeros(3, np.int64)},
        {"spans": np.array([[0, 4]])},
        {"spans": np.array([[-1, 2]])},
        {"spans": np.array([[2, 1]])},
        {"spans": np.array([[0, 2**62]])},
        {"k": 0},
        {"k": -5},
    ],
)
def test_compiled_loop_refuses_arrays_that_do_not_fit(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        compiled(*make_arguments(**change))


@needs_compiled
def test_compiled_loop_refuses_what_is_no_buffer() -> None:
    with pytest.raises(TypeError):
        compiled(*make_arguments(documents=[1, 2, 3]))
    with pytest.raises((BufferError, ValueError)):
        compiled(*make_arguments(documents=np.arange(6, dtype=np.uint32)[::2]))
    with pytest.raises(OverflowError):
        compiled(*make_arguments(k=2**80))


@needs_compiled
def test_compiled_loop_keeps_no_memory() -> None:
    index = SearchIndex(draw_postings(2, 20_000), compiled)
    index.search("b c d", 1_000)  # Python keeps the memory of tuples for the next
    before = sys.getallocatedblocks()
    for _ in range(200):
        index.search("b c d", 1_000)
    assert sys.getallocatedblocks() - before < 200


@pytest.mark.parametrize("loop", LOOPS)
def test_no_documents_and_no_terms(loop: Rank) -> None:
    empty = np.empty(0, np.uint32)
    nothing = {"documents": empty, "counts": empty.astype(np.uint16), "norms": empty.astype(np.uint8)}
    assert loop(*make_arguments(**nothing, spans=np.empty((0, 2), np.int64), weights=np.empty(0, np.float32))) == []
    assert loop(*make_arguments(spans=np.array([[1, 1]]))) == []


@needs_compiled
@settings(max_examples=300)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 30), st.data())
def test_compiled_loop_survives_any_numbers(documents: list[int], size: int, data: st.DataObject) -> None:
    ends = st.integers(-1, len(documents) + 1)
    spans = data.draw(st.lists(st.tuples(ends, ends), max_size=4))
    arguments = make_arguments(
        documents=np.array(documents, np.uint32),
        counts=np.array(
            data.draw(st.lists(st.integers(0, 9), min_size=len(documents), max_size=len(documents))), np.uint16
        ),
        norms=np.zeros(size, np.uint8),
        spans=np.array(spans, np.int64).reshape(-1, 2),
        weights=np.ones(len(spans), np.float32),
        k=data.draw(st.integers(-1, 40)),
    )
    try:
        found = compiled(*arguments)
    except ValueError:
        return
    assert {number for number, _ in found} <= set(range(size))
