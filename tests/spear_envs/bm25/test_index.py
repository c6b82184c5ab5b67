"""Searching, stems, postings, and how they are packed."""

import json
import lzma
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.bm25.analysis import analyze, stem_word
from spear_envs.bm25.build import build_index
from spear_envs.bm25.index import MAX_TERMS, SearchIndex, rank_with_numpy
from spear_envs.bm25.packing import (
    BLOCK,
    BOUNDS,
    MAPPED_SHARE,
    PADDING,
    count_words,
    pack_pairs,
    pack_postings,
    unpack_pairs,
)
from spear_envs.bm25.postings import (
    NumberWords,
    choose_numbering,
    make_postings,
    number_with_python,
    pack_terms,
    quantize_lengths,
    unpack_terms,
)
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


EXAMPLES = """
caresses caress  ponies poni  ties ti  caress caress  cats cat  feed feed  agreed agre  plastered plaster
bled bled  motoring motor  sing sing  conflated conflat  troubled troubl  sized size  hopping hop  tanned tan
falling fall  hissing hiss  fizzed fizz  failing fail  filing file  happy happi  sky sky  relational relat
conditional condit  rational ration  valenci valenc  hesitanci hesit  digitizer digit  conformabli conform
radicalli radic  differentli differ  vileli vile  analogousli analog  vietnamization vietnam  predication predic
operator oper  feudalism feudal  decisiveness decis  hopefulness hope  callousness callous  formaliti formal
sensitiviti sensit  sensibiliti sensibl  triplicate triplic  formative form  formalize formal  electriciti electr
electrical electr  hopeful hope  goodness good  revival reviv  allowance allow  inference infer  airliner airlin
gyroscopic gyroscop  adjustable adjust  defensible defens  irritant irrit  replacement replac  adjustment adjust
dependent depend  adoption adopt  homologou homolog  communism commun  activate activ  angulariti angular
homologous homolog  effective effect  bowdlerize bowdler  probate probat  rate rate  cease ceas  controll control
roll roll  archaeology archaeolog  possibly possibl
s s  is is  ed ed  4s 4s  é é  ys ys  4ked 4ked  naïveté naïveté  cafés café
"""


def list_examples() -> list[tuple[str, str]]:
    words = EXAMPLES.split()
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(("word", "stem"), list_examples())
def test_examples_of_the_paper_and_its_later_rules_short_and_odd_words(word: str, stem: str) -> None:
    assert stem_word(word) == stem


@given(st.text(st.sampled_from("aeiouylsztdngbr1é"), max_size=30))
def test_a_stem_is_never_empty_and_never_much_longer(word: str) -> None:
    stem = stem_word(word)
    assert bool(stem) == bool(word)
    assert len(stem) <= len(word)


def test_lucenes_own_stems(shared: Path) -> None:
    path = shared / "golden" / "webshop" / "stem_cases.json.xz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        cases: dict[str, str] = json.load(file)
    assert len(cases) == 6_924
    assert {word: stem for word, stem in cases.items() if analyze(word) != ([stem] if stem else [])} == {}


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


@settings(max_examples=30)
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
