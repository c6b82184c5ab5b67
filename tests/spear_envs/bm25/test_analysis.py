"""Text analysis: the chain's rules one by one, any Unicode text, and Lucene's own results where they are at hand."""

import json
import lzma
import sys
import time
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.bm25 import analysis
from spear_envs.bm25.analysis import analyze, tokenize

ANY_TEXT = st.text(st.characters(), max_size=60)  # lone surrogates included
ODD_TEXT = st.text(
    st.sampled_from("aZ9_'’.,:;\"-/ \n\u202f\u0301\u200dİéאカ漢あกภ®👍🏽🇩#\ufe0f\u20e3\ud800𝐀"), max_size=40
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4k a_1 __init__ ___", ["4k", "a_1", "__init__"]),
        ("o'neil u.s.a x:y end. 'quoted'", ["o'neil", "u.s.a", "x:y", "end", "quoted"]),
        ("3.5mm 3,500mah 1;2 a;b 1:2 x.1", ["3.5mm", "3,500mah", "1;2", "a", "b", "1", "2", "x", "1"]),
        ('t-shirt w/o a|b 1+1 r&d 5"x7"', ["t", "shirt", "w", "o", "a", "b", "1", "1", "r", "d", "5", "x7"]),
        ("o’neil a·b", ["o’neil", "a·b"]),
        ('צה"ל', ['צה"ל']),
        ("カタカナabc", ["カタカナ", "abc"]),
        ("漢字ひら", ["漢", "字", "ひ", "ら"]),
        ("ภาษาไทย", ["ภาษาไทย"]),
        ("👍🏽ok 👨‍👩‍👧 1️⃣", ["👍🏽", "ok", "👨‍👩‍👧", "1️⃣"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("10\u202f000", ["10\u202f000"]),
        ("日本\ud800a", ["日", "本", "a"]),
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    assert [token for word in analysis.split_words(text) for token in tokenize(word)] == tokens


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Women's DRESSES", ["women", "dress"]),
        ("the's the THE", []),
        ("boys’ dog’s cat＇S", ["boi", "dog", "cat"]),
        ("İstanbul ΣΑΣ", ["istanbul", "σασ"]),
        ("", []),
        (" \t\n", []),
        ("- / ...", []),
    ],
)
def test_terms(text: str, terms: list[str]) -> None:
    assert analyze(text) == terms


@pytest.mark.parametrize("letter", ["a", "é"])
def test_long_tokens_are_cut(letter: str) -> None:
    assert [len(term) for term in analyze(letter * 520)] == [255, 255, 10]


def test_cut_counts_utf_16_units() -> None:
    assert [len(term) for term in analyze("𝐀" * 300)] == [127, 127, 46]


def test_what_joins_letters_does_not_reach_over_a_cut() -> None:
    assert analyze("k" * 254 + ".k") == ["k" * 254, "k"]
    assert analyze("k" * 255 + ".k") == ["k" * 255, "k"]
    assert analyze("k" * 253 + ".k") == ["k" * 253 + ".k"]


@given(st.one_of(ANY_TEXT, ODD_TEXT))
def test_any_text_has_terms_that_can_be_looked_up(text: str) -> None:
    terms = analyze(text)
    assert all(terms)
    assert all(len(term) <= 255 for term in terms)


@given(st.text(st.characters(max_codepoint=127), max_size=80))
def test_ascii_pattern_gives_what_the_pattern_for_all_scripts_gives(text: str) -> None:
    assert tokenize(text) == [token for token in analysis.compile_unicode().findall(text) if token]


@given(st.one_of(ANY_TEXT, ODD_TEXT))
def test_cutting_at_blanks_first_changes_no_token(text: str) -> None:
    whole = [token for token in analysis.compile_unicode().findall(text) if token]
    assert [token for word in analysis.split_words(text) for token in tokenize(word)] == whole


@pytest.mark.parametrize(
    "text",
    [
        "_",
        "_\u0301",
        "é",
        "é'",
        "é_",
        "y",
        "y.",
        "1,",
        "カ",
        "カ_",
        "漢",
        "ก",
        'א"',
        "a😀",
        "😀\u200d",
        "\u0301",
        "\U0001f1e6",
    ],
)
def test_no_text_takes_long(text: str) -> None:
    analyze("é")  # compiles the pattern
    start = time.process_time()
    analyze("é" + text * (100_000 // len(text)))  # as long as a response may be
    assert time.process_time() - start < 2  # seconds; it takes a tenth of that


@given(st.lists(st.tuples(ODD_TEXT, st.integers(1, 300)), max_size=6))
def test_long_texts_are_read_through_a_buffer_of_255_units(parts: list[tuple[str, int]]) -> None:
    text = "".join(part * count for part, count in parts)[:1_000]
    pattern = analysis.compile_unicode()
    tokens, place = [], 0
    while found := pattern.search(text, place):
        start = found.start()
        units = accumulate(1 + (letter > "\uffff") for letter in text[start : start + 255])
        found = pattern.match(text, start, start + sum(count <= 255 for count in units))
        place = found.end()
        tokens += [found[1]] if found[1] else []
    assert tokenize(text) == tokens


def test_lucenes_own_tokens(shared: Path) -> None:
    path = shared / "golden" / "webshop" / "analyzer_cases.jsonl.xz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    assert len(cases) == 502
    assert [case["text"] for case in cases if analyze(case["text"]) != case["tokens"]] == []


def test_every_code_point_alone_and_between_letters() -> None:
    for code in range(0, sys.maxunicode + 1, 61):
        analyze(f"a{chr(code)}1 {chr(code)}")
