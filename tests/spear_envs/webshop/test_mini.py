"""The generated catalogue: what is in it, that it is the same everywhere, and that near misses do not win."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from spear_envs.data.embedded import read_embedded
from spear_envs.webshop.catalog import Catalog
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


# ---------------------------------------------------------------- what wins, and what does not


def test_the_wanted_product_wins(mini: Catalog, goals: list[Goal], products: list[Product]) -> None:
    for goal in goals:
        number = mini.number_of(goal.asin)
        assert number is not None
        assert buy(mini, goal, mini.product(number), dict(goal.options)).reward == 1.0  # type: ignore[arg-type]


# ---------------------------------------------------------------- other sizes, and the cost
