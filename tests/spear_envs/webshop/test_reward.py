"""The score of a purchase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.webshop.goals import Goal
from spear_envs.webshop.products import read_product
from spear_envs.webshop.reward import compare_titles, count_option_hits, score_purchase
from tests.spear_envs.webshop.conftest import golden_nouns, make_goal, make_product, read_packed


@pytest.mark.parametrize(("folder", "count"), [("", 2_000), ("human", 500)])
def test_recorded_purchases_score_the_same(golden: Path, official: Path, folder: str, count: int) -> None:
    attributes = read_packed(official / "items_ins_v2_1000.json.xz")
    records = read_packed(official / "items_shuffle_1000.json.xz")
    products = {record["asin"]: read_product(record, attributes.get(record["asin"])) for record in records}
    prices = read_packed(golden / "prices.json.xz")
    goals = [Goal.from_row(row) for row in read_packed(golden / folder / "goals.jsonl.xz")]
    cases = read_packed(golden / folder / "reward_cases.jsonl.xz")
    wrong = []
    for case in cases:
        goal, product = goals[case["goal"]], products[case["asin"]]
        score = score_purchase(
            goal, product, prices[product.asin], case["options"], golden_nouns(product.title), golden_nouns(goal.title)
        )
        if any(case[name] != value for name, value in score._asdict().items()):
            wrong.append((case, score))
    assert wrong == []
    assert len(cases) == count


LAMP = make_product(
    "A000000001",
    "Red Table Lamp",
    description="It is DIMMABLE.",
    bullets=("cordless", "made of oak wood"),
    prices=(25.0,),
    options={"color": ("red", "blue"), "size": ("large",)},
    query="lamps",
    product_category="Home › Lighting › Lamps",
    attributes=("easy clean", "long lasting"),
)


def score(goal: Goal, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "product": LAMP,
        "price": 25.0,
        "options": {},
        "nouns": ["table", "lamp"],
        "goal_nouns": ["table", "lamp"],
    }
    return score_purchase(goal, **{**values, **changes})


def test_attributes_count_by_likeness_or_as_part_of_a_text() -> None:
    wanted = ("easy to clean", "table lamp", "cordless made", "dimmable", "machine washable")
    found = score(make_goal(LAMP, attributes=wanted))
    # "easy to clean" holds both words; bullets are joined by a blank; texts in upper case are lowered, wishes are not.
    assert found.attribute_hits == 4
    assert score(make_goal(LAMP, attributes=("Table Lamp",))).attribute_hits == 0
    assert found.reward == (4 + 0 + 1) / 6


def test_options_of_synthetic_goals_are_pairs_and_of_human_ones_values() -> None:
    pairs = (("color", "red"), ("size", "large"))
    assert count_option_hits(["bright red", "large"], pairs) == 2
    assert count_option_hits(["tired"], (("mood", "tired"),)) == 0  # the chosen value alone is folded, to "red"
    assert count_option_hits(["tired"], ("tired",)) == 1
    assert count_option_hits(["x-large"], (("size", "large"),)) == 0
    assert count_option_hits([], ("red",)) == 0
    assert count_option_hits(["red"], (("red", "navy"),)) == 0  # the first colour of the alphabet stands for the pair
    assert count_option_hits(["navy"], (("red", "navy"),)) == 1


@pytest.mark.parametrize(
    ("query", "levels", "nouns", "r_type"),
    [
        ("lamps", "", ["lamp", "sofa"], 1.0),
        ("sofas", "Home › Lighting", ["lamp", "oak", "bed", "pan", "car"], 1.0),
        ("sofas", "Home ›  Sofas", ["lamp", "oak", "bed", "pan", "car"], 0.5),
        ("sofas", "", ["lamp", "oak"], 1.0),
        ("lamps", "Home › Lighting", ["lamp", *"abcdefghij"], 0.1),  # below 0.1 wins over an equal query
        ("lamps", "Home › Lighting", ["sofa"], 0.0),
        ("sofas", "", [], 0.5),
    ],
)
def test_kind_of_product(query: str, levels: str, nouns: list[str], r_type: float) -> None:
    assert score(make_goal(LAMP, query=query, product_category=levels), goal_nouns=nouns).r_type == r_type


def test_titles_are_compared_by_the_goals_nouns() -> None:
    assert compare_titles(["a", "a", "b"], ["a", "a", "c", "d"]) == 0.25
    assert compare_titles([], []) == 0.2
    assert compare_titles([], ["a"]) == 0.0


def test_price_at_the_ceiling_is_fine() -> None:
    assert score(make_goal(LAMP, price_upper=25.0)).price_ok
    assert not score(make_goal(LAMP, price_upper=24.99)).price_ok


words = st.text("abc redé", max_size=10)


@given(
    st.lists(words, max_size=4), st.lists(words, max_size=3), st.lists(words, max_size=4), st.lists(words, max_size=4)
)
def test_score_is_a_share(attributes: list[str], wishes: list[str], nouns: list[str], goal_nouns: list[str]) -> None:
    goal = make_goal(LAMP, attributes=tuple(attributes), options=tuple(wishes))
    found = score(goal, options={"color": "red", "size": "large"}, nouns=nouns, goal_nouns=goal_nouns)
    assert 0.0 <= found.reward <= 1.0
