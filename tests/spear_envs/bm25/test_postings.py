"""The arrays of an index against dictionaries made the plain way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.bm25.analysis import analyze
from spear_envs.bm25.postings import (
    QUANTIZED_LENGTHS,
    NumberWords,
    choose_numbering,
    make_postings,
    number_with_python,
    pack_terms,
    quantize_lengths,
    unpack_terms,
)


@pytest.mark.parametrize(("length", "kept"), [(0, 0), (23, 23), (39, 39), (40, 40), (41, 40), (100, 96), (1000, 984)])
def test_lengths_are_kept_as_lucene_keeps_them(length: int, kept: int) -> None:
    assert QUANTIZED_LENGTHS[quantize_lengths(np.array([length]))[0]] == kept


@given(st.integers(0, 2**31 - 1))
def test_quantised_length_follows_the_bit_formula(length: int) -> None:
    if length < 24:
        code = length
    else:
        rest = length - 24
        bits = rest.bit_length()
        code = 24 + (rest if rest < 8 else ((rest >> (bits - 4)) & 7) | ((bits - 3) << 3))
    assert quantize_lengths(np.array([length]))[0] == code


compiled = choose_numbering()
needs_compiled = pytest.mark.skipif(compiled is number_with_python, reason="the extension module was not built")
LOOPS = [pytest.param(number_with_python, id="python"), pytest.param(compiled, id="compiled", marks=needs_compiled)]


@pytest.mark.parametrize("loop", LOOPS)
@given(st.lists(st.text(st.sampled_from("ab cs'é漢\u202f\u00a0\x1c\n\ud800"), max_size=30), max_size=8))
def test_postings_hold_every_term_of_every_text(loop: NumberWords, texts: list[str]) -> None:
    postings = make_postings(texts, number_words=loop)
    documents = [Counter(analyze(text)) for text in texts]
    terms = unpack_terms(postings.term_bytes, postings.term_ends)
    assert terms == sorted({term.encode() for counts in documents for term in counts})
    for number, term in enumerate(terms):
        span = slice(*postings.starts[number : number + 2])
        found = dict(zip(postings.documents[span].tolist(), postings.counts[span].tolist(), strict=True))
        assert list(found) == sorted(found)
        assert found == {i: n for i, counts in enumerate(documents) if (n := counts[term.decode()])}
    assert len(postings.starts) == len(terms) + 1
    assert postings.terms_total == sum(map(Counter.total, documents))
    assert postings.filled == sum(map(bool, documents))
    assert postings.norms.tolist() == quantize_lengths(np.array([c.total() for c in documents], np.int64)).tolist()


@pytest.mark.parametrize(("documents", "terms"), [(300, 0), (85, 3), (128, 2), (257, 255), (260, 260), (1, 70_000)])
def test_pairs_are_counted_whatever_width_their_numbers_need(documents: int, terms: int) -> None:
    words = [f"w{i}k" for i in range(terms)]
    postings = make_postings([" ".join(words)] * documents)
    assert len(postings.starts) == terms + 1
    assert np.array_equal(np.diff(postings.starts), np.full(terms, documents))
    assert np.array_equal(postings.documents, np.tile(np.arange(documents), terms))
    assert (postings.counts == 1).all()
    assert postings.filled == documents * bool(terms)


@needs_compiled
def test_compiled_loop_knows_more_words_than_its_first_table_holds() -> None:
    texts = [f"w{i}k " * (1 + i % 2) + f"{'long' * 60}{i}" for i in range(40_000)]
    (found, ends), (expected, expected_ends) = (
        loop(texts, lambda word: (len(word), hash(word) % 1_000)) for loop in (compiled, number_with_python)
    )
    assert found == expected
    assert ends == expected_ends


@needs_compiled
@pytest.mark.parametrize("result", [None, [1], (-1,), ("x",), (2**70,)])
def test_compiled_loop_refuses_what_are_no_numbers(result: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        compiled(["red dress"], lambda word: result)  # type: ignore[arg-type,return-value]


@needs_compiled
def test_compiled_loop_passes_errors_on() -> None:
    def fail(word: str) -> tuple[int, ...]:
        raise KeyError(word)

    with pytest.raises(KeyError, match="red"):
        compiled(iter(["red dress"]), fail)
    with pytest.raises(TypeError, match="a text is not a str"):
        compiled([b"red"], fail)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="reader"):
        compiled(_fail_after_one(), lambda word: ())


def _fail_after_one() -> Iterator[str]:
    yield "red"
    raise RuntimeError("reader")


def test_a_term_counts_at_most_65535_times() -> None:
    assert make_postings(["shirt " * 70_000]).counts.tolist() == [65_535]


@given(st.lists(st.binary(max_size=5), max_size=8))
def test_terms_come_back_from_their_array(terms: list[bytes]) -> None:
    assert unpack_terms(*pack_terms(terms)) == terms
