"""The score of a purchase, and what it is made of: likeness, nouns, and drawn prices."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop.goals import NO_CEILING, Goal
from spear_envs.webshop.products import read_product
from spear_envs.webshop.reward import (
    COLOURS,
    RULE,
    compare_titles,
    count_option_hits,
    find_tagger,
    fold_colour,
    matches,
    name_tagger,
    rule_nouns,
    score_purchase,
    spacy_nouns,
    token_set_ratio,
)
from spear_envs.webshop.stock import ceilings_above, make_draws
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
        ("ΟΔΟΣ", "οδος", 75),  # ς is a letter of its own
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


def test_without_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(SpearError, match=r"pip install 'spear-envs\[webshop\]'"):
        find_tagger("spacy:en_core_web_sm")


def test_a_spacy_pipeline(save_pipeline: Callable[[bool], Path]) -> None:
    folder = save_pipeline(True)
    tag_all = spacy_nouns(str(folder))
    assert tag_all(["Buy my Desk, a lamp of 16oz", "", "Desk Desk"]) == [("desk", "lamp", "oz"), (), ("desk", "desk")]
    assert find_tagger(f"spacy:{folder}").name == f"spacy:{folder}"


AMOUNTS = st.floats(0, 2_000)


@given(AMOUNTS | st.integers(0, 200).map(lambda i: i * 10.0))
def test_ceilings_are_the_next_four_tens(price: float) -> None:
    assert ceilings_above(price) == tuple(step for step in (10.0 * i for i in range(1, 100)) if step > price)[:4]


@pytest.mark.parametrize("mode", ["keyed", "sequential"])
@given(AMOUNTS, AMOUNTS, st.integers(0, 2**40))
def test_prices_lie_in_their_range_and_ceilings_above(mode: str, a: float, b: float, seed: int) -> None:
    draws = make_draws(mode, seed)
    price = draws.draw_price("B1", a, b)
    assert min(a, b) <= price <= max(a, b)
    ceiling = draws.draw_ceiling("B1", 0, price)
    # The larger of two is never the lowest.
    assert ceiling in (ceilings_above(price)[1:] or (NO_CEILING,))


def test_keyed_draws_stay_what_they_are() -> None:
    draws = make_draws("keyed", 42)
    assert draws.draw_price("B06Y3VLDFB", 10.0, 20.0) == 17.95671668564851
    assert [draws.draw_ceiling("B06Y3VLDFB", number, 15.0) for number in range(8)] == [
        30.0,
        50.0,
        50.0,
        50.0,
        50.0,
        50.0,
        40.0,
        40.0,
    ]
