from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.search.grading import exact_match, f1_score, normalize_answer

ANSWERS = st.text(st.sampled_from("abthe ANnoyes-.'é"), max_size=12)


def test_normal_forms_are_the_recorded_ones(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = golden("normalize")
    assert len(cases) == 30
    assert {case["id"]: normalize_answer(case["text"]) for case in cases} == {
        case["id"]: case["normalized"] for case in cases
    }


def test_scores_are_the_recorded_ones(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = golden("grading")
    assert len(cases) == 86
    for case in cases:
        assert exact_match(case["prediction"], case["golds"]) == case["exact_match"], case
        assert f1_score(case["prediction"], case["golds"]) == pytest.approx(case["f1"], abs=1e-6), case


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("twenty-one", "twentyone"),
        ("x-the-y", "xthey"),
        ("“Hamlet”", "“hamlet”"),
        ("The  Theatre", "theatre"),
        ("İ", "i̇"),
        ("an a the", ""),
        (string.punctuation, ""),
    ],
)
def test_the_order_is_squad_s(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "f1"),
    [
        ("yes it is", ["yes"], 0, 0),
        ("no", ["no"], 1, 1),
        ("the the", ["The The"], 1, 1),
        ("", ["The The"], 0, 0),
        ("", [""], 0, 0),
        ("a", ["the"], 0, 0),
        ("1 000", ["1000"], 0, 0),
        ("b b", ["b a b c"], 0, 0.8),
        ("x", [], 0, 0),
        (None, ["x"], 0, 0),
        ("x", "x", 1, 1),
    ],
)
def test_hard_cases(prediction: str | None, golds: Any, exact: float, f1: float) -> None:
    assert exact_match(prediction, golds) == exact
    assert f1_score(prediction, golds) == pytest.approx(f1)


@given(ANSWERS, st.lists(ANSWERS, max_size=3))
def test_scores_agree_with_each_other(prediction: str, golds: list[str]) -> None:
    exact, f1 = exact_match(prediction, golds), f1_score(prediction, golds)
    assert exact in (0.0, 1.0) and 0.0 <= f1 <= 1.0
    assert f1 == 1.0 or exact == 0.0
    assert exact_match(prediction, [*golds, prediction]) == float(bool(prediction.strip()))
    assert f1_score(prediction, golds) == max((f1_score(prediction, gold) for gold in golds), default=0.0)
    assert exact_match(prediction, golds[::-1]) == exact


@given(ANSWERS)
def test_normalising_is_idempotent_up_to_new_articles(text: str) -> None:
    once = normalize_answer(text)
    assert once == " ".join(once.split())
    assert not set(once) & set(string.punctuation)
    assert normalize_answer(once) == once
