from __future__ import annotations

import json

import numpy as np
import pytest

from spear_envs.core.errors import UnknownTaskError
from spear_envs.webshop.catalog import Catalog
from spear_envs.webshop.goals import Goal
from tests.spear_envs.webshop.catalogs import load, make_entry, make_options, make_record


def make_catalog() -> Catalog:
    records = [make_record(f"B{i:03d}", customization_options=make_options(Size=["s", "m"])) for i in range(900)]
    records[3]["category"] = None
    return load(records, {record["asin"]: make_entry("soft") for record in records})


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return make_catalog()


def test_tasks_describe_their_goals(catalog: Catalog) -> None:
    made = catalog.make_tasks("test")
    assert len(made) == 500 and made.bounded
    task = made[17]
    assert task.id == "webshop/test/00017" and task.split == "test" and task.subtask == "garden"
    assert task.instruction == task.goal.instruction == catalog.goals().goal(17).instruction
    assert Goal.from_row(json.loads(json.dumps(task.definition()))["content"]) == task.goal
    assert made.get("webshop/test/00017") is task and made.draw(np.random.default_rng(0)) in list(made)
    assert {task.subtask for task in catalog.make_tasks("all")} == {"garden", "other"}


@pytest.mark.parametrize(
    "task_id", ["webshop/test/17", "webshop/train/00017", "webshop/test/00500", "webshop/test/-0001", "x", 17, "٠٠٠٠٠"]
)
def test_unknown_ids(catalog: Catalog, task_id: str) -> None:
    with pytest.raises(UnknownTaskError, match="run from 'webshop/test/00000' to 'webshop/test/00499'"):
        catalog.make_tasks("test").get(task_id)


def test_fingerprints_cover_order_prices_text_and_tagger() -> None:
    def print_of(
        names: str = "ABC", pricing: str = "$1 - $9", text: str = "Find me x", **settings: object
    ) -> tuple[str, str]:
        records = [make_record(name, pricing=pricing) for name in names]
        entries = {name: make_entry("soft", instruction=text) for name in names}
        made = load(records, entries, **settings)
        return made.make_tasks("test").fingerprint, made.fingerprint

    from spear_envs.webshop.nouns import find_tagger

    base = print_of()
    assert print_of() == base
    tagger = find_tagger("rule")._replace(name="another")
    for other in (print_of(pricing="$1 - $8"), print_of(price_seed=43), print_of(tagger=tagger), print_of("ABD")):
        assert other[0] != base[0] and other[1] != base[1]
    # The order of the file decides the order of the goals, and nothing else.
    shuffled = print_of("BCA")
    assert shuffled[0] != base[0] and shuffled[1] == base[1]
    assert print_of(text="Find me y")[0] != base[0]


def test_splits_and_schemes_have_their_own_fingerprints(catalog: Catalog) -> None:
    sets = [
        catalog.make_tasks(split, split_scheme=scheme)
        for split, scheme in [
            ("train", "original"), ("train", "product"), ("test", "original"), ("test", "product"), ("all", "original")
        ]
    ]  # fmt: skip
    assert len({made.fingerprint for made in sets}) == len(sets)
    same = [catalog.make_tasks("test", split_scheme=scheme).fingerprint for scheme in ("original", "verl-agent")]
    assert same[0] == same[1]
