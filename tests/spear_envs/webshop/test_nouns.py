from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop.nouns import RULE, find_tagger, name_tagger, rule_nouns, spacy_nouns


@pytest.mark.parametrize(
    ("title", "nouns"),
    [
        ("", []),
        ("Wooden Table Lamp for the Living Room", ["wooden", "table", "lamp", "living", "room"]),
        ("Women's Long-Sleeve T-Shirt, Size X", ["women", "long", "sleeve", "t", "shirt", "size"]),
        ("Cat5e Cable 16oz (Pack of 12) 3 pcs", ["cat5e", "cable", "oz", "pack", "pcs"]),
        ("Salt & Pepper / Sugar + Spice - 100% Natural", ["salt", "pepper", "sugar", "spice", "natural"]),
        ("<b>Bold</b> Towel,Soft:Red=Nice", ["b", "bold</b", "towel", "soft", "red", "nice"]),
        ("Lamp Lamp LAMP", ["lamp", "lamp", "lamp"]),
        ("小米 Чай Café", ["小米", "чай", "café"]),
        ("4K Camera, 128GB, 1080p", ["k", "camera", "gb"]),
    ],
)
def test_the_rule(title: str, nouns: list[str]) -> None:
    assert rule_nouns(title) == nouns


@given(st.text())
def test_nouns_are_lower_case_words_of_the_title(title: str) -> None:
    found = rule_nouns(title)
    assert all(noun and noun == noun.lower() and not any(map(str.isspace, noun)) for noun in found)
    joined = title.lower()
    assert all(noun in joined for noun in found)


def shout(title: str) -> list[str]:
    return [title.upper()]


def test_taggers_by_name_and_by_function() -> None:
    rule = find_tagger(RULE)
    assert rule.name == "rule" and rule.tag_all(["Red Lamp", ""]) == [("red", "lamp"), ()]
    own = find_tagger(shout)
    assert own.name == f"custom:{__name__}.shout" == name_tagger(shout)
    assert own.tag_all(["a"]) == [("A",)]
    for wrong in ("spacy", "spacy:", "nltk", 3, "", ["rule"]):
        with pytest.raises(SpearError, match="is not valid: give 'rule', 'spacy:MODEL' or a function"):
            find_tagger(wrong)  # type: ignore[arg-type]


class Unhashable(list[str]):
    def __call__(self, title: str) -> list[str]:
        return list(self)


def test_functions_that_are_no_taggers() -> None:
    with pytest.raises(SpearError, match="is not hashable: give a plain function"):
        find_tagger(Unhashable())
    for result in (None, "red lamp", [1], {"red"}):
        with pytest.raises(SpearError, match="for the title 'Red Lamp': it must return a list of words"):
            find_tagger(lambda title, result=result: result).tag_all(["Red Lamp"])  # type: ignore[misc]


def test_without_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(SpearError, match=r"needs spaCy .*pip install 'spear-envs\[webshop\]'"):
        find_tagger("spacy:en_core_web_sm")


@pytest.fixture(scope="module")
def save_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    spacy = pytest.importorskip("spacy")

    def save(tags: bool) -> Path:
        """A pipeline that calls capitalised words PROPN, some others NOUN and VERB, or that tags nothing."""
        pipeline = spacy.blank("en")
        if tags:
            ruler = pipeline.add_pipe("attribute_ruler")
            ruler.add([[{"IS_TITLE": True}]], {"POS": "PROPN"})
            ruler.add([[{"LOWER": {"IN": ["lamp", "oz"]}}]], {"POS": "NOUN"})
            ruler.add([[{"LOWER": "buy"}]], {"POS": "VERB"})
            ruler.add([[{"IS_PUNCT": True}]], {"POS": "PUNCT"})
        folder = tmp_path_factory.mktemp("pipeline") / "model"
        pipeline.to_disk(folder)
        return folder

    return save


def test_a_spacy_pipeline(save_pipeline: Callable[[bool], Path]) -> None:
    folder = save_pipeline(True)
    tag_all = spacy_nouns(str(folder))
    assert tag_all(["Buy my Desk, a lamp of 16oz", "", "Desk Desk"]) == [("desk", "lamp", "oz"), (), ("desk", "desk")]
    assert find_tagger(f"spacy:{folder}").name == f"spacy:{folder}"


def test_a_spacy_pipeline_without_tags(save_pipeline: Callable[[bool], Path]) -> None:
    with pytest.raises(SpearError, match="does not tag parts of speech"):
        spacy_nouns(str(save_pipeline(False)))(["Red Lamp"])


def test_a_missing_spacy_model() -> None:
    pytest.importorskip("spacy")
    with pytest.raises(SpearError, match="'python -m spacy download no_such_model' fetches it"):
        find_tagger("spacy:no_such_model")
