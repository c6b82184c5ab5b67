"""Both loops against a scorer that follows the formula one document at a time, and against each other."""

import math
import struct
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.bm25.analysis import analyze
from spear_envs.bm25.index import Rank, SearchIndex, choose_rank, rank_with_numpy
from spear_envs.bm25.packing import BLOCK, PADDING, PackedPairs, pack_pairs, pack_postings
from spear_envs.bm25.postings import QUANTIZED_LENGTHS, Postings, make_postings, pack_terms, quantize_lengths

compiled: Any = choose_rank()
needs_compiled = pytest.mark.skipif(compiled is rank_with_numpy, reason="the extension module was not built")
LEVELS = (0, 1) if "avx2" in Path("/proc/cpuinfo").read_text("ascii").split() else (0,)
"""Of the compiled loop, those below the processor's best."""
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
    assert SearchIndex(pack_postings(make_postings(texts)), loop).search_scored(query, k) == rank_by_formula(
        texts, query, k
    )


def draw_postings(seed: int, documents: int) -> Postings:
    """A random index of single-letter terms: some in nearly every document, some in a handful, few distinct scores."""
    rng = np.random.default_rng(seed)
    held, counts = [], []
    shares = [0.9, 0.5, 0.2, 0.01, 0.001, 3 / documents, 1.0]
    for share in shares:
        chosen = rng.random(documents) < share
        chosen[seed % documents] = True  # no term of an index is without a document
        found = np.flatnonzero(chosen)
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
    st.sampled_from([1, 2, 50, 70, 1_000, 10**6]),
)
def test_loops_agree_over_many_windows_and_ties(seed: int, documents: int, query: str, k: int) -> None:
    packed = pack_postings(draw_postings(seed, documents))
    expected = SearchIndex(packed, rank_with_numpy).search_scored(query, k)
    assert SearchIndex(packed, compiled).search_scored(query, k) == expected


def draw_spans(seed: int, terms: int, documents: int) -> list[Any]:
    """Arguments of a loop, all but the weights and k: terms of any number of documents, gaps and counts."""
    rng = np.random.default_rng(seed)
    frequencies = np.minimum(rng.geometric(rng.choice([0.001, 0.01, 0.5], terms)), documents).astype(np.int64)
    frequencies[rng.random(terms) < 0.1] = min(BLOCK * int(rng.integers(1, 4)), documents)
    held = [np.sort(rng.choice(documents, size, replace=False)) for size in frequencies]
    counts = rng.choice([1, 1, 1, 2, 40, 65_535], int(frequencies.sum()))
    factors = rng.choice([0.01, 0.5, 1.0, 1.5, 1.8], 256).astype(np.float32)
    norms = rng.integers(0, 4, documents).astype(np.uint8)
    numbers = np.concatenate(held).astype(np.uint32)
    pairs = pack_pairs(frequencies, numbers, counts.astype(np.uint16), factors[norms])
    return list_arguments(pairs, frequencies, norms, factors)


def list_arguments(
    pairs: PackedPairs,
    frequencies: npt.NDArray[np.int64],
    norms: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
) -> list[Any]:
    """Arguments of a loop for a query of all terms, all but the weights and k."""
    blocks = -(-frequencies // BLOCK)
    map_numbers = np.full(len(frequencies), -1)
    map_numbers[pairs.mapped] = np.arange(len(pairs.mapped))
    spans = np.column_stack([np.cumsum(blocks) - blocks, frequencies, pairs.peaks, map_numbers]).astype(np.int64)
    data = np.append(pairs.data, np.zeros(PADDING, np.uint8))
    return [pairs.lasts, pairs.blocks, data, norms, pairs.maps, factors, spans]


@needs_compiled
@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.integers(1, 40),
    st.sampled_from([1, 200, 4_097, 30_000]),
    st.sampled_from([1, 3, 50, 10**6]),
    st.sampled_from([0.0, 3.0, 40.0]),
)
def test_loops_agree_whatever_the_weights(seed: int, terms: int, documents: int, k: int, spread: float) -> None:
    """Also where sums are rounded, which depends on their order: weights of 2 to the power of 40 and less beside 1."""
    arguments = draw_spans(seed, terms, documents)
    weights = np.exp2(np.random.default_rng(seed).uniform(-spread, spread, terms)).astype(np.float32)
    expected = rank_with_numpy(*arguments, weights, k)
    assert compiled(*arguments, weights, k) == expected
    for level in LEVELS:
        assert compiled(*arguments, weights, k, level) == expected


@needs_compiled
def test_a_query_of_1024_terms() -> None:
    arguments = draw_spans(5, 1_024, 20_000)
    weights = np.random.default_rng(5).uniform(0.5, 17, 1_024).astype(np.float32)
    for k in (1, 3, 100):
        assert compiled(*arguments, weights, k) == rank_with_numpy(*arguments, weights, k)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("place", [129, 5_000, 39_999])
def test_a_document_that_is_a_little_better_is_never_passed_over(loop: Rank, place: int) -> None:
    documents = np.arange(40_000, dtype=np.uint32)
    factors, norms = np.ones(256, np.float32), np.zeros(len(documents), np.uint8)
    factors[1], norms[place] = 1.03, 1
    counts = np.ones(2 * len(documents), np.uint16)
    frequencies = np.array([len(documents)] * 2)
    pairs = pack_pairs(frequencies, np.tile(documents, 2), counts, factors[norms])
    found = loop(*list_arguments(pairs, frequencies, norms, factors), np.array([2, 1], np.float32), 3)
    assert [number for number, _ in found] == [place, 0, 1]


@pytest.mark.parametrize("loop", LOOPS)
def test_documents_that_share_a_bound_have_that_of_the_better_block(loop: Rank) -> None:
    """Document 300 is in the better of two blocks of one span, and the threshold lies between their bounds."""
    documents, counts = np.arange(1_024, dtype=np.uint32), np.ones(1_024, np.uint16)
    counts[5], counts[300] = 3, 50
    frequencies, factors = np.array([len(documents)]), np.ones(256, np.float32)
    pairs = pack_pairs(frequencies, documents, counts, factors[np.zeros(len(documents), np.uint8)])
    arguments = list_arguments(pairs, frequencies, np.zeros(len(documents), np.uint8), factors)
    assert [number for number, _ in loop(*arguments, np.ones(1, np.float32), 1)] == [300]


@pytest.mark.parametrize("loop", LOOPS)
def test_sums_that_are_rounded_are_made_in_the_order_of_the_terms(loop: Rank) -> None:
    """Eight numbers that a large one would swallow one by one, and which decide together how the sum is rounded."""
    weights = np.array([2.0**-24] * 8 + [64, 2.0**30], np.float32)
    factors, norms = np.full(256, 1e30, np.float32), np.zeros(3, np.uint8)
    frequencies = np.ones(len(weights), np.int64)
    numbers = np.zeros(len(weights), np.uint32)
    pairs = pack_pairs(frequencies, numbers, np.ones(len(weights), np.uint16), factors[norms])
    *arguments, spans = list_arguments(pairs, frequencies, norms, factors)
    assert loop(*arguments, spans, weights, 3) == [(0, 2.0**30 + 128)]
    assert loop(*arguments, spans[::-1].copy(), weights[::-1].copy(), 3) == [(0, 2.0**30)]


@needs_compiled
@pytest.mark.parametrize("apart", [1, 40], ids=["map", "gaps"])
def test_most_of_a_long_list_is_passed_over(apart: int) -> None:
    """The rare term alone decides: of the frequent one only the loop that reads all sees a damaged block."""
    documents = np.arange(0, 200_000 * apart, apart, dtype=np.uint32)
    rare = documents[[7, 8, 9, 70_000, 150_000]]
    frequencies = np.array([len(documents), len(rare)])
    numbers = np.concatenate([documents, rare])
    counts, size = np.ones(len(numbers), np.uint16), int(documents[-1]) + 1
    pairs = pack_pairs(frequencies, numbers, counts, np.ones(size, np.float32))
    assert len(pairs.mapped) == (apart == 1)
    pairs.blocks[1_000] |= np.uint64(63 << 40)
    factors, weights = np.ones(256, np.float32), np.array([0.1, 9], np.float32)
    arguments = [*list_arguments(pairs, frequencies, np.zeros(size, np.uint8), factors), weights, 3]
    assert [number for number, _ in compiled(*arguments)] == rare[:3].tolist()
    with pytest.raises(ValueError, match="more bits"):
        rank_with_numpy(*arguments)


@needs_compiled
def test_threads_do_not_meet() -> None:
    index = SearchIndex(pack_postings(draw_postings(1, 60_000)), compiled)
    queries = ["b c", "d e f", "h", "c d e q", "g f"] * 20
    expected = [index.search(query) for query in queries]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(index.search, queries)) == expected


def make_arguments(**changes: Any) -> list[Any]:
    """Arguments of a loop for three documents and one term, some of them changed."""
    documents, counts, norms = np.array([0, 1, 2], np.uint32), np.array([1, 4, 1], np.uint16), np.zeros(3, np.uint8)
    pairs = pack_pairs(np.array([3]), documents, counts, np.ones(3, np.float32))
    arguments: dict[str, Any] = {
        "lasts": pairs.lasts,
        "blocks": pairs.blocks,
        "data": np.append(pairs.data, np.zeros(1_024, np.uint8)),
        "norms": norms,
        "maps": pairs.maps,
        "factors": np.ones(256, np.float32),
        "spans": np.array([[0, 3, pairs.peaks[0], 0]], np.int64),
        "weights": np.array([1], np.float32),
        "k": 50,
    }
    return list((arguments | changes).values())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "change",
    [
        {"lasts": np.array([3], np.uint32)},
        {"lasts": np.array([2**32 - 1], np.uint32)},
        {"lasts": np.array([1], np.uint32)},
        {"blocks": np.array([33 << 40], np.uint64)},
        {"blocks": np.array([17 << 46], np.uint64)},
        {"blocks": np.array([2**40 - 1], np.uint64)},
        {"spans": np.array([[1, 3, 0, -1]])},
        {"spans": np.array([[0, 129, 0, -1]])},
        {"spans": np.array([[-1, 3, 0, -1]])},
        {"spans": np.array([[0, 0, 0, -1]])},
    ],
)
def test_numbers_that_no_index_has_are_found(loop: Rank, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        loop(*make_arguments(**change))


@needs_compiled
@pytest.mark.parametrize(
    "change",
    [
        {"blocks": np.zeros(2, np.uint64)},
        {"lasts": np.zeros(7, np.uint16)},
        {"factors": np.ones(255, np.float32)},
        {"factors": np.full(256, np.nan, np.float32)},
        {"factors": np.full(256, -1, np.float32)},
        {"weights": np.ones(2, np.float32)},
        {"weights": np.array([0], np.float32)},
        {"weights": np.array([np.inf], np.float32)},
        {"spans": np.zeros(5, np.int64)},
        {"spans": np.array([[0, 3, 256, 0]])},
        {"spans": np.array([[2**62, 3, 0, -1]])},
        {"spans": np.array([[0, 2**62, 0, -1]])},
        {"data": np.zeros(600, np.uint8)},
        {"level": -1},
        {"level": 3},
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
        compiled(*make_arguments(lasts=[1, 2, 3]))
    with pytest.raises((BufferError, ValueError)):
        compiled(*make_arguments(lasts=np.arange(6, dtype=np.uint32)[::2]))
    with pytest.raises(OverflowError):
        compiled(*make_arguments(k=2**80))


@needs_compiled
def test_compiled_loop_keeps_no_memory() -> None:
    index = SearchIndex(pack_postings(draw_postings(2, 20_000)), compiled)
    index.search("b c d", 1_000)  # Python keeps the memory of tuples for the next
    before = sys.getallocatedblocks()
    for _ in range(200):
        index.search("b c d", 1_000)
    assert sys.getallocatedblocks() - before < 200


@needs_compiled
@settings(max_examples=300)
@given(st.integers(0, 1_000), st.data())
def test_compiled_loop_survives_any_bytes(seed: int, data: st.DataObject) -> None:
    """Bytes of the files are changed: there is an answer of documents that exist, or an error."""
    arguments = draw_spans(seed, 5, 700)
    for array in filter(len, arguments[:5]):
        for place, value in data.draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3)):
            array.view(np.uint8)[place % array.nbytes] = value
    try:
        found = compiled(*arguments, np.array([1, 2, 3, 4, 5], np.float32), data.draw(st.integers(1, 40)))
    except ValueError:
        return
    assert {number for number, _ in found} <= set(range(700))
