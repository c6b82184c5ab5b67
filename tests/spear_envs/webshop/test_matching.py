"""Likeness of texts and folding of colours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.webshop.matching import COLOURS, fold_colour, matches, token_set_ratio
from tests.spear_envs.webshop.conftest import read_packed

UPPER = str.maketrans("abcdexyzou", "ABCDEXYZOU")
texts = st.text(st.sampled_from("abcdexyz 019_-'éßİ你🙂"), max_size=24)


def test_recorded_ratios_of_thefuzz_hold(golden: Path) -> None:
    cases = read_packed(golden / "fuzzy_cases.jsonl.xz")
    pairs = [(a, str(tuple(b)) if isinstance(b, list) else b, ratio) for a, b, ratio in cases]
    assert [case for case in pairs if token_set_ratio(*case[:2]) != case[2]] == []
    assert len(pairs) == 1_500


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        ("large", "('size', 'large')", 100),
        ("x-large", "('size', 'large')", 83),
        ("", "('size', 'large')", 0),
        ("éè", "large", 0),  # nothing is left of it
        ("你好", "你好", 100),  # other scripts stay
        ("İ", "i", 100),  # one letter in lower case, not two
        ("a_b", "a b", 100),  # no letter and no digit
        ("leak proof", "proof, leak", 100),
        ("fuzzy", "wuzzy", 80),
    ],
)
def test_known_ratios(a: str, b: str, ratio: int) -> None:
    assert token_set_ratio(a, b) == ratio


def measure_slowly(a: str, b: str) -> int:
    """Length of the longest common subsequence by the textbook."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], (diagonal + 1 if x == y else max(row[j], row[j - 1]))
    return row[-1]


@given(st.text("abcd", min_size=1, max_size=12), st.text("abcd", min_size=1, max_size=12))
def test_of_single_words_it_is_the_indel_similarity(a: str, b: str) -> None:
    expected = 100 if a == b else round(100 - 100 * (len(a) + len(b) - 2 * measure_slowly(a, b)) / (len(a) + len(b)))
    assert token_set_ratio(a, b) == expected


@given(texts, texts)
def test_ratio_is_symmetric_and_bounded(a: str, b: str) -> None:
    assert token_set_ratio(a, b) == token_set_ratio(b, a)
    assert 0 <= token_set_ratio(a, b) <= 100
    assert matches(a, b) == (token_set_ratio(a, b) > 85)


@given(texts, st.randoms(use_true_random=False))
def test_order_and_case_of_words_do_not_count(text: str, rng: object) -> None:
    words = text.split()
    rng.shuffle(words)  # type: ignore[attr-defined]
    assert token_set_ratio(text, " ".join(words)) == token_set_ratio(text, text)
    assert token_set_ratio(text, text.translate(UPPER)) == token_set_ratio(text, text)


def test_colours_are_found_anywhere_and_in_order() -> None:
    assert list(COLOURS) == sorted(COLOURS) and len(COLOURS) == 102
    assert fold_colour("tired") == "red"
    assert fold_colour("dark blue") == "blue"  # "blue" comes before "dark" in the list
    assert fold_colour("blueblack") == "black"
    assert fold_colour("Red") == "Red"  # upper case is not a colour
    assert fold_colour("xx-small") == "xx-small"
