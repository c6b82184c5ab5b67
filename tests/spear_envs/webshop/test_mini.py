"""The generated catalogue: what is in it, that it is the same everywhere, and that near misses do not win."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from spear_envs.data.embedded import read_embedded
from spear_envs.webshop.catalog import Catalog
from spear_envs.webshop.draws import NO_CEILING
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.opening import open_catalog
from spear_envs.webshop.products import Product
from spear_envs.webshop.reward import Score, score_purchase

"""Of the records. A change of them makes a new catalogue: scores on it do not compare with those on the old one."""
CATEGORIES = {"beauty", "electronics", "fashion", "garden", "grocery"}

Records = tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def records() -> Records:
    data = read_embedded("webshop")
    return data["items"], data["attributes"], data["human"]


@pytest.fixture(scope="module")
def mini() -> Catalog:
    return open_catalog("mini")


@pytest.fixture(scope="module")
def products(mini: Catalog) -> list[Product]:
    return [mini.product(number) for number in range(len(mini))]


@pytest.fixture(scope="module")
def goals(mini: Catalog) -> list[Goal]:
    return [mini.goals().goal(i) for i in range(len(mini.goals()))]


def buy(mini: Catalog, goal: Goal, product: Product, options: dict[str, str]) -> Score:
    number, wanted = mini.number_of(product.asin), mini.number_of(goal.asin)
    assert number is not None and wanted is not None
    return score_purchase(goal, product, mini.price(number), options, mini.nouns(number), mini.nouns(wanted))


# ---------------------------------------------------------------- the same everywhere


# ---------------------------------------------------------------- what is in it


def test_size_shelves_and_asins(records: Records) -> None:
    items, attributes, human = records
    asins = [item["asin"] for item in items]
    assert len(items) == len(set(asins)) == 1000
    assert all(re.fullmatch(r"Z0[A-Z]{8}", asin) for asin in asins)
    assert {item["category"] for item in items} == CATEGORIES
    queries = Counter((item["category"], item["query"]) for item in items)
    assert len(queries) >= 40 and min(queries.values()) >= 8
    assert set(attributes) <= set(asins) and set(human) <= set(attributes)


def test_goals_and_splits(mini: Catalog, goals: list[Goal]) -> None:
    assert len(goals) >= 500
    owners = {}
    for kind in ("synthetic", "human"):
        for split in ("train", "eval", "test"):
            tasks = mini.make_tasks(split, goal_kind=kind)
            assert len(tasks) == 100 if split != "train" else len(tasks) >= 100
            assert {task.subtask for task in tasks} == CATEGORIES
            owners[split] = {task.content["asin"] for task in tasks}
        assert not owners["train"] & owners["eval"] | owners["train"] & owners["test"] | owners["eval"] & owners["test"]


def test_it_has_what_official_data_has(records: Records, products: list[Product], goals: list[Goal]) -> None:
    items, attributes, _ = records
    kinds = Counter(len(product.prices) for product in products)
    assert 70 <= kinds[2] <= 110  # a price range
    assert 20 <= sum(not item["pricing"] for item in items) <= 100
    assert {len(product.options) for product in products} == {0, 1, 2}
    assert any(
        product.options and None in item["customization_options"].values() for product, item in pair(products, items)
    )
    assert any(not product.options and item["customization_options"] for product, item in pair(products, items))
    assert any(
        len({*item["customization_options"]}) > len(product.options) > 0 for product, item in pair(products, items)
    )
    assert any(len(set(values)) < len(values) for product in products for values in product.options.values())
    assert any(
        set(first) & set(second)
        for product in products
        for first, second in [[*product.options.values()]] * (len(product.options) == 2)
    )
    assert any("" in product.bullets for product in products) and any(product.bullets[0] == "" for product in products)
    assert any(isinstance(item["small_description"], str) for item in items)
    assert any(not product.description for product in products)
    assert any(item["asin"] not in attributes for item in items)
    assert any(goal.price_upper == NO_CEILING for goal in goals)
    assert {len(goal.options) for goal in goals} == {0, 1, 2} and {len(goal.attributes) for goal in goals} == {1, 2, 3}
    titles = "".join(product.title for product in products)
    values = "".join(dict(goal.options)[group] for goal in goals for group in dict(goal.options))  # type: ignore[arg-type]
    for mark in ("é", "'", "<", "&", '"'):
        assert mark in titles and mark in values
    assert " | " in values


def pair(products: list[Product], items: list[dict[str, Any]]) -> Iterator[tuple[Product, dict[str, Any]]]:
    """Products with their records, of those that have option groups."""
    by_asin = {item["asin"]: item for item in items}
    return ((product, by_asin[product.asin]) for product in products if by_asin[product.asin]["customization_options"])


def test_searches_find_many_few_and_none_and_scores_are_equal(mini: Catalog, products: list[Product]) -> None:
    found = {query: len(mini.search(query)) for query in ("kids room", "tangle", "jogging", "zzzz")}
    assert found["kids room"] == 50 and 10 < found["tangle"] < 50 and 0 < found["jogging"] < 10 and found["zzzz"] == 0
    texts = Counter(product.index_text for product in products)
    assert sum(count > 1 for count in texts.values()) >= 10
    text = next(text for text, count in texts.items() if count > 1)
    hits = mini.search(text)
    assert [mini.product(number).index_text for number in hits[:2]] == [text, text] and hits[0] < hits[1]


# ---------------------------------------------------------------- what wins, and what does not


def test_the_wanted_product_wins(mini: Catalog, goals: list[Goal], products: list[Product]) -> None:
    for goal in goals:
        number = mini.number_of(goal.asin)
        assert number is not None
        assert buy(mini, goal, mini.product(number), dict(goal.options)).reward == 1.0  # type: ignore[arg-type]


def test_every_near_miss_scores_below_one(mini: Catalog, goals: list[Goal], products: list[Product]) -> None:
    """Every goal has all kinds of near misses that it can have, and none of them wins, bought as well as can be."""
    by_query: dict[str, list[Product]] = {}
    for product in products:
        by_query.setdefault(product.query, []).append(product)
    for goal in goals:
        wanted = dict(goal.options)  # type: ignore[arg-type]
        lacking = too_dear = other_option = 0
        for product in by_query[goal.query]:
            shares = all(value in product.options.get(group, ()) for group, value in wanted.items())
            score = buy(mini, goal, product, wanted if shares else {})
            if score.attribute_hits < len(goal.attributes):
                lacking += score.price_ok and shares and score.attribute_hits == len(goal.attributes) - 1
                assert score.reward < 1
            elif not score.price_ok:
                too_dear += shares
                assert score.reward < 1
            if product.asin == goal.asin:
                for group, value in wanted.items():
                    for other in {*product.options[group]} - {value}:
                        other_option += 1
                        assert buy(mini, goal, product, {**wanted, group: other}).reward < 1
                    without = {name: chosen for name, chosen in wanted.items() if name != group}
                    assert buy(mini, goal, product, without).reward < 1
        assert lacking, goal
        assert too_dear or goal.price_upper == NO_CEILING, goal
        assert other_option >= len(wanted), goal


def test_the_right_product_can_be_told(mini: Catalog, goals: list[Goal], products: list[Product]) -> None:
    """Most goals have one winner of their kind, and its title says all; the features say what the title does not."""
    by_query: dict[str, list[Product]] = {}
    for product in products:
        by_query.setdefault(product.query, []).append(product)
    alone = told = 0
    for goal in goals:
        wanted = dict(goal.options)  # type: ignore[arg-type]
        winners = [
            product
            for product in by_query[goal.query]
            if all(value in product.options.get(group, ()) for group, value in wanted.items())
            and buy(mini, goal, product, wanted).reward == 1.0
        ]
        alone += len(winners) == 1
        product = next(product for product in winners if product.asin == goal.asin)
        in_title = all(attribute in product.title.lower() for attribute in goal.attributes)
        told += in_title
        assert in_title or all(
            attribute in f"{product.title} {product.bullets}".lower() for attribute in goal.attributes
        )
    assert alone / len(goals) > 0.95
    assert 0.75 < told / len(goals) < 0.95


def test_people_ask_in_other_words(mini: Catalog, records: Records) -> None:
    rows = [row for entry in records[2].values() for row in entry]
    asked = [row for row in rows if row["instruction_attributes"]]
    assert len(asked) >= 300 and len({row["instruction"] for row in asked}) > 0.9 * len(asked)
    assert len(rows) > len(asked)  # a few name no attribute, and make no goal
    assert len(mini.goals("human")) == len(asked)
    literal = sum(all(phrase in row["instruction"] for phrase in row["instruction_attributes"]) for row in asked)
    assert literal == 0


# ---------------------------------------------------------------- other sizes, and the cost
