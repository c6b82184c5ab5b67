"""Packing postings, and bounds that no score is above."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.bm25.packing import (
    BLOCK,
    BOUNDS,
    MAPPED_SHARE,
    PADDING,
    count_words,
    pack_pairs,
    unpack_pairs,
)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 8, 9, 127, 128, 129, 300]), min_size=1, max_size=6),
    st.sampled_from([1, 2, 100, 10**6]),
    st.sampled_from([1, 2, 9, 65_535]),
    st.integers(0, 10_000),
)
def test_pairs_come_back(frequencies: list[int], gap: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    documents = [np.cumsum(rng.integers(1, gap + 1, size)) - 1 for size in frequencies]
    counts = [rng.integers(1, most + 1, size) for size in frequencies]
    size = 1 + max(int(numbers[-1]) for numbers in documents)
    factors = np.resize(rng.uniform(0.001, 1.9, min(size, 10_000)).astype(np.float32), size)
    held = np.concatenate(documents).astype(np.uint32), np.concatenate(counts).astype(np.uint16)
    pairs = pack_pairs(np.array(frequencies), *held, factors, offset=5)
    data = np.concatenate([np.full(5, 255, np.uint8), pairs.data, np.zeros(PADDING, np.uint8)])
    maps = dict(zip(pairs.mapped.tolist(), pairs.maps.reshape(len(pairs.mapped), count_words(size)), strict=True))
    first = 0
    for number, frequency in enumerate(frequencies):
        span = slice(first, first := first + -(-frequency // BLOCK))
        term_map = maps.get(number)
        assert (term_map is not None) == (frequency * MAPPED_SHARE >= size)
        found = unpack_pairs(frequency, pairs.lasts[span], pairs.blocks[span], data, term_map)
        assert np.array_equal(found[0], documents[number])
        assert np.array_equal(found[1], counts[number])
        lengths = counts[number].astype(np.float32) * factors[documents[number]]
        codes = (pairs.blocks[span] >> np.uint64(51)).astype(np.int64)
        greatest = np.maximum.reduceat(lengths, np.arange(0, frequency, BLOCK))
        assert (greatest <= BOUNDS[codes]).all()
        assert ((codes == 0) | (greatest > BOUNDS[codes - 1])).all()
        assert pairs.peaks[number] == codes.max()
    assert first == len(pairs.lasts)


def test_a_document_number_may_have_32_bits() -> None:
    documents = np.array([0, 2**32 - 2, 2**32 - 1], np.uint32)
    factors = np.broadcast_to(np.float32(1), 2**32)
    pairs = pack_pairs(np.array([3]), documents, np.ones(3, np.uint16), factors)
    found, counts = unpack_pairs(3, pairs.lasts, pairs.blocks, np.append(pairs.data, np.zeros(PADDING, np.uint8)))
    assert found.tolist() == documents.tolist()
    assert counts.tolist() == [1, 1, 1]


def test_bounds_are_fine_where_scores_differ() -> None:
    """A bound is at most 1/32 above the length that it bounds, from 0.25 to 62."""
    assert np.isinf(BOUNDS[-1])
    assert (np.diff(BOUNDS[:-1]) <= BOUNDS[:-2] / 32).all()
    assert BOUNDS[0] == 0.25
    assert BOUNDS[-2] == 62.0


@given(st.floats(2.0**-30, 2.0**10, width=32), st.floats(2.0**-20, 2.0**17, width=32), st.integers(1, 3))
def test_scores_grow_with_what_is_bounded(weight: float, length: float, steps: int) -> None:
    weights, one = np.float32(weight), np.float32(1)
    lengths = [np.float32(length)]
    for _ in range(steps):
        lengths.append(np.nextafter(lengths[-1], np.float32(np.inf)))
    scores = [weights - weights / (one + length) for length in lengths]
    assert scores == sorted(scores)
    # Each is a whole multiple of half the last place of the weight: sums of them need no rounding.
    half = np.spacing(weights).astype(np.float64) / 2
    assert all(float(score) / half == round(float(score) / half) for score in scores)


def test_no_pairs_and_a_pair_alone_take_no_data() -> None:
    none = pack_pairs(np.empty(0, np.int64), np.empty(0, np.uint32), np.empty(0, np.uint16), np.ones(1, np.float32))
    assert not len(none.lasts) and not len(none.data) and not len(none.peaks)
    alone = pack_pairs(np.array([1]), np.array([9], np.uint32), np.ones(1, np.uint16), np.ones(10, np.float32))
    assert alone.lasts.tolist() == [9]
    assert not len(alone.data)
