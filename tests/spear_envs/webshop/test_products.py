from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop.products import DEFAULT_PRICE, is_listed, parse_prices, read_options, read_product
from tests.spear_envs.webshop.catalogs import make_options, make_record


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        ("", (100.0,), "$100.0"),
        ("$18.00", (18.0,), "$18.0"),
        ("$19.99 - $27.99", (19.99, 27.99), "$19.99 to $27.99"),
        ("$1,234.56", (1234.56,), "$1234.56"),
        ("from $5 to $7 or $9", (5.0, 7.0), "$5.0 to $7.0"),
        ("19.99", (100.0,), "$100.0"),
        ("US$3", (3.0,), "$3.0"),
    ],
)
def test_prices_and_tags(pricing: str, prices: tuple[float, ...], tag: str) -> None:
    assert parse_prices(pricing) == prices
    assert read_product(make_record("B1", pricing=pricing)).price_tag == tag


@pytest.mark.parametrize("pricing", ["$", "$1.2.3", "$.", "$ - $5", "$" + "9" * 400])
def test_prices_that_are_none(pricing: str) -> None:
    with pytest.raises(SpearError, match=r"product B1: the price .* cannot be read"):
        read_product(make_record("B1", pricing=pricing))


@given(st.text(alphabet="$0123456789.,- ab€", max_size=30))
def test_prices_are_the_digits_behind_the_signs(pricing: str) -> None:
    pieces = [re.sub(r"[^\d.]", "", piece) for piece in pricing.split("$")[1:]][:2]
    try:
        expected = tuple(float(piece) for piece in pieces) or (DEFAULT_PRICE,)
    except ValueError:
        with pytest.raises(SpearError):
            parse_prices(pricing)
    else:
        assert parse_prices(pricing) == expected
        assert all(map(math.isfinite, parse_prices(pricing)))


def test_options() -> None:
    raw = {"Color": [{"value": " Navy/Blue "}, {"value": "RED", "image": "x"}], "Size": None, "Style": []}
    assert read_options(raw) == {"color": ("navy | blue", "red"), "style": ()}


def test_a_later_group_of_the_same_name_replaces_the_earlier_in_its_place() -> None:
    options = read_options(make_options(Color=["red"], Size=["l"], COLOR=["blue", "green"]))
    assert list(options.items()) == [("color", ("blue", "green")), ("size", ("l",))]


@given(st.dictionaries(st.text(max_size=5), st.none() | st.lists(st.text(max_size=8), max_size=4), max_size=5))
def test_options_are_lower_case_and_complete(groups: dict[str, list[str] | None]) -> None:
    raw = {name: None if values is None else [{"value": value} for value in values] for name, values in groups.items()}
    options = read_options(raw)
    assert set(options) == {name.lower() for name, values in groups.items() if values is not None}
    last = {name.lower(): values for name, values in groups.items() if values is not None}
    for name, values in options.items():
        assert list(values) == [value.strip().replace("/", " | ").lower() for value in last[name]]


def test_index_text_takes_the_first_bullet_and_the_options() -> None:
    record = make_record(
        "B1",
        name="A <b>Lamp</b>",
        full_description="For READING",
        small_description=["Bright", "Cheap"],
        customization_options=make_options(Size=["S", "M"], Color=["Red"]),
    )
    assert read_product(record).index_text == "a <b>lamp</b> for reading bright size: s, m, and color: red"
    assert read_product({**record, "small_description": []}).index_text.startswith("a <b>lamp</b> for reading  size")


def test_what_may_be_missing() -> None:
    product = read_product({"asin": "B1", "name": "Thing"})
    assert product.prices == (100.0,) and product.options == {} and product.bullets == ("",)
    assert product.category == product.query == product.product_category == product.description == ""
    assert product.attributes == ("DUMMY_ATTR",)
    assert read_product(make_record("B1"), {"instruction": "x"}).attributes == ("DUMMY_ATTR",)
    assert read_product(make_record("B1"), {"attributes": ["soft"]}).attributes == ("soft",)


def test_bullets_may_be_one_text_and_the_query_is_stripped() -> None:
    product = read_product(make_record("B1", small_description="All in one", query="  Desk LAMPS "))
    assert product.bullets == ("All in one",) and product.query == "desk lamps"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"asin": None}, "lacks an asin"),
        ({"asin": 7}, "lacks an asin"),
        ({"asin": "Ä"}, "plain letters"),
        ({"name": None}, "B1: name is null"),
        ({"name": ["x"]}, "B1: name is a list"),
        ({"full_description": 3}, "full_description is a number"),
        ({"small_description": ["a", None]}, "small_description must be a list of texts"),
        ({"small_description": {"a": 1}}, "small_description is an object"),
        ({"pricing": 19.99}, "pricing is a number"),
        ({"customization_options": "size: large"}, "customization_options is a text"),
        ({"customization_options": {"Size": "large"}}, "option 'Size' is a text"),
        ({"customization_options": {"Size": ["large"]}}, "option 'Size' is not an object"),
        ({"customization_options": {"Size": [{"value": 3}]}}, "option 'Size' is not an object"),
        ({"query": True}, "query is a truth value"),
    ],
)
def test_odd_types_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        read_product({**make_record("B1"), **fields})


def test_odd_attributes_are_named() -> None:
    with pytest.raises(SpearError, match="B1: attributes must be a list of texts"):
        read_product(make_record("B1"), {"attributes": "soft"})


def test_which_asins_are_listed() -> None:
    assert is_listed("B06Y3VLDFB") and is_listed("1")
    assert not is_listed("nan") and not is_listed("B06Y3VLDFB1")
