"""The generated catalogue: what is in it, that it is the same everywhere, and that near misses do not win."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.webshop.catalog import Catalog
from spear_envs.webshop.draws import NO_CEILING
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.matching import matches
from spear_envs.webshop.memory import make_catalog
from spear_envs.webshop.mini import make_records, stream_records, write_files
from spear_envs.webshop.mini.words import ATTRIBUTES, SHELVES
from spear_envs.webshop.nouns import find_tagger
from spear_envs.webshop.opening import open_catalog
from spear_envs.webshop.products import Product
from spear_envs.webshop.reward import Score, score_purchase

SHA256 = "0cfeb7d975dc318f6f20834fd2bea451ca3bea549cddc97872381d0bba4a9c24"
"""Of the records. A change of them makes a new catalogue: scores on it do not compare with those on the old one."""
CATEGORIES = {"beauty", "electronics", "fashion", "garden", "grocery"}

Records = tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def records() -> Records:
    return make_records()


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


def test_the_catalogue_is_the_pinned_one_whatever_the_hash_seed() -> None:
    program = (
        "import hashlib; from spear_envs.core.tasks import canonical_json;"
        "from spear_envs.webshop.mini import make_records;"
        "print(hashlib.sha256(canonical_json(make_records()).encode()).hexdigest())"
    )
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == SHA256


def test_records_can_be_had_one_by_one_and_from_another_seed(records: Records) -> None:
    items = [record.item for record in stream_records(40)]
    titles = [item["name"] for item in items]
    assert titles == [item["name"] for item in records[0][:40]]
    assert titles != [record.item["name"] for record in stream_records(40, seed=1)]


@pytest.mark.parametrize("products", [0, -1, 10**9, 1.5, True, "many"])
def test_impossible_sizes_are_refused(products: Any) -> None:
    with pytest.raises(SpearError, match="give a whole number from 1 to"):
        stream_records(products)


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


def test_words_are_few_and_titles_short(products: list[Product], goals: list[Goal]) -> None:
    shown = [f"{p.title} {p.price_tag} {' '.join(p.options)} {' '.join(sum(p.options.values(), ()))}" for p in products]
    words = set(re.findall(r"[^\W_]+", " ".join([*shown, *(goal.instruction for goal in goals)]).lower()))
    assert 300 < len(words) < 1000
    every = words | set(re.findall(r"[^\W_]+", " ".join(f"{p.description} {p.bullets}" for p in products).lower()))
    assert len(every) < 1200
    assert all(4 <= len(product.title.split()) <= 10 for product in products)
    # An ASIN is Z0 and one of 32 first and one of 32 second pieces, none of which is a word.
    pieces = {product.asin[2:6] for product in products}, {product.asin[6:] for product in products}
    assert all(len(half) == 32 for half in pieces) and not pieces[0] & pieces[1]
    assert not {piece.lower() for half in pieces for piece in half} & every


def test_no_attribute_passes_for_another() -> None:
    phrases = sorted({phrase for known in ATTRIBUTES.values() for phrase in known})
    for first in phrases:
        for second in phrases:
            assert first == second or not (matches(first, second) or first in second)
    assert all(len(shelf.attributes) == len(set(shelf.attributes)) == 8 for shelf in SHELVES)


def test_people_ask_in_other_words(mini: Catalog, records: Records) -> None:
    rows = [row for entry in records[2].values() for row in entry]
    asked = [row for row in rows if row["instruction_attributes"]]
    assert len(asked) >= 300 and len({row["instruction"] for row in asked}) > 0.9 * len(asked)
    assert len(rows) > len(asked)  # a few name no attribute, and make no goal
    assert len(mini.goals("human")) == len(asked)
    literal = sum(all(phrase in row["instruction"] for phrase in row["instruction_attributes"]) for row in asked)
    assert literal == 0


# ---------------------------------------------------------------- other sizes, and the cost


def test_any_seed_of_prices_leaves_near_misses_dear(records: Records) -> None:
    """The catalogue does not depend on what is drawn: the margins are wider than any draw."""
    for seed in (0, 1):
        catalog = make_catalog(*records, name="mini", tagger=find_tagger("rule"), price_seed=seed)
        source = catalog.goals()
        test_every_near_miss_scores_below_one(
            catalog,
            [source.goal(i) for i in range(len(source))],
            [catalog.product(number) for number in range(len(catalog))],
        )


def test_larger_catalogues_have_as_many_words_as_real_ones() -> None:
    records = list(stream_records(2000, long_tail=True))
    assert len({record.item["asin"] for record in records}) == 2000
    texts = [f"{record.item['name']} {record.item['full_description']}".lower() for record in records]
    words = [set(re.findall(r"\w+", text)) for text in texts]
    assert 12_000 < len(set().union(*words)) < 24_000
    assert 60 < sum(map(len, words)) / len(words) < 110


def test_asins_of_a_million_products_differ() -> None:
    from spear_envs.webshop.mini.generate import _make_asin

    asins = {_make_asin(index, 1000) for index in range(0, 1_000_000, 7)}
    assert len(asins) == -(-1_000_000 // 7)
    assert all(len(asin) == 10 and asin.startswith("Z0") for asin in asins)


def test_files_are_read_like_official_ones(tmp_path: Path, records: Records) -> None:
    write_files(tmp_path / "new", 1000)
    loaded = [
        json.loads((tmp_path / "new" / f"{name}.json").read_text("utf-8"))
        for name in ("items_shuffle", "items_ins_v2", "items_human_ins")
    ]
    assert tuple(loaded) == records
    assert open_catalog(tmp_path / "new").fingerprint == open_catalog("mini").fingerprint
    write_files(tmp_path / "tiny", 1)
    assert len(json.loads((tmp_path / "tiny" / "items_shuffle.json").read_text("utf-8"))) == 1
    json.loads((tmp_path / "tiny" / "items_human_ins.json").read_text("utf-8"))


def test_making_it_takes_little_time_and_memory() -> None:
    """Records, goals and index: half a second of CPU and 40 MB at most."""
    program = """
import resource, time
import spear_envs.webshop.opening, spear_envs.webshop.mini
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, began = peak(), time.process_time()
catalog = spear_envs.webshop.opening.open_catalog("mini")
catalog.make_tasks("test"); catalog.search("oil")
print(time.process_time() - began, (peak() - before) / 1024)
"""
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    figures = [tuple(map(float, run.stdout.split())) for run in runs]
    assert min(seconds for seconds, _ in figures) < 0.5
    assert min(megabytes for _, megabytes in figures) < 40
