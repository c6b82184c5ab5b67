"""Porter's stemmer, with the examples of his paper, and Lucene's stems where they are at hand."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.bm25.analysis import analyze
from spear_envs.bm25.stemmer import stem_word

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
"""


def list_examples() -> list[tuple[str, str]]:
    words = EXAMPLES.split()
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(("word", "stem"), list_examples())
def test_examples_of_the_paper_and_its_two_later_rules(word: str, stem: str) -> None:
    assert stem_word(word) == stem


@pytest.mark.parametrize("word", ["s", "is", "ed", "4s", "é", "ys"])
def test_short_words_stay(word: str) -> None:
    assert stem_word(word) == word


@pytest.mark.parametrize(("word", "stem"), [("4ked", "4ked"), ("naïveté", "naïveté"), ("cafés", "café")])
def test_what_is_no_vowel_is_a_consonant(word: str, stem: str) -> None:
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
