from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.webshop.goal_files import read_goals, read_prices, write_goals
from spear_envs.webshop.goals import Goal, make_goal
from tests.spear_envs.webshop.catalogs import load, make_entry, make_options, make_record
from tests.spear_envs.webshop.conftest import make_product

words = st.text(max_size=12)
goals = st.builds(
    Goal,
    asin=words,
    instruction=words,
    attributes=st.lists(words, max_size=3).map(tuple),
    options=st.dictionaries(words, words, max_size=3).map(lambda options: tuple(options.items()))
    | st.lists(words, min_size=1, max_size=3).map(tuple),
    price_upper=st.floats(0, 1e6),
    weight=st.floats(0, 1),
    query=words,
    category=words,
    product_category=words,
    title=words,
)


@given(st.lists(goals, min_size=1, max_size=5), st.booleans())
def test_goals_come_back_from_a_file(
    tmp_path_factory: pytest.TempPathFactory, several: list[Goal], packed: bool
) -> None:
    path = tmp_path_factory.mktemp("goals") / f"goals.jsonl{'.xz' * packed}"
    write_goals(several, path)
    assert read_goals(path) == several
    if path.suffix != ".xz":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read_goals(path) == several


def test_the_text_of_a_goal() -> None:
    product = make_product("B1")
    goal = make_goal(product, "Find me x", ("soft",), (("color", "red"), ("size", "l")), 30.0, 0.5)
    assert goal.instruction == "Find me x with color: red, and size: l, and price lower than 30.00 dollars"
    assert make_goal(product, "Find me x", ("soft",), (), 1_000_000.0, 1.0).instruction == "Find me x"
    assert make_goal(product, "I want x", ("soft",), ("red",), 1_000_000.0, 1.0).instruction == "I want x"


def test_a_product_makes_a_goal_of_each_combination_of_its_options() -> None:
    record = make_record("B1", customization_options=make_options(Size=["S", "M"], Color=["Red"], Style=["a", "b"]))
    catalog = load([record, make_record("B2")], {"B1": make_entry("soft", "durable"), "B2": {"attributes": ["soft"]}})
    source = catalog.goals()
    made = [source.goal(position) for position in range(len(source))]
    assert sorted(goal.options for goal in made) == [
        (("color", "red"), ("size", size), ("style", style)) for size in ("m", "s") for style in ("a", "b")
    ]
    assert len({goal.price_upper for goal in made}) == 1
    assert {goal.weight for goal in made} == {0.25}


def test_products_without_goals() -> None:
    records = [
        make_record("B1"),
        make_record("B2"),
        make_record("B3", customization_options=make_options(Size=[])),
        make_record("B4"),
    ]
    entries = {
        "B1": {"attributes": ["soft"], "instruction": None, "instruction_attributes": None},
        "B2": {"attributes": ["soft"], "instruction": "Find me x", "instruction_attributes": []},
        "B3": make_entry("soft"),
        "B4": make_entry("soft"),
    }
    source = load(records, entries).goals()
    assert [source.goal(position).asin for position in range(len(source))] == ["B4"]
    with pytest.raises(SpearError, match="lacks goals of this kind"):
        load(records[:2], entries).goals()


def test_weights_are_rarities() -> None:
    entries = {"B1": make_entry("a", "b"), "B2": make_entry("a"), "B3": make_entry("a", "c")}
    source = load([make_record(asin) for asin in entries], entries).goals()
    weights = {source.goal(position).asin: source.goal(position).weight for position in range(3)}
    assert weights == pytest.approx({"B1": (1 / 3 + 1) / 2, "B2": 1 / 3, "B3": (1 / 3 + 1) / 2})


def test_human_goals() -> None:
    row = {"instruction": "..I need x.", "instruction_attributes": ["soft"], "instruction_options": ["red"]}
    human = {"B1": [{**row, "instruction_attributes": []}, row, row], "B9": [row]}
    source = load([make_record("B1", pricing="$5"), make_record("B2")], {}, human).goals("human")
    assert len(source) == 2
    for position in range(2):
        goal = source.goal(position)
        assert goal.instruction.startswith("I need x, and price lower than ") and goal.weight == 1
        assert goal.options == ("red",) and goal.attributes == ("soft",)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": 1}, "instructions for B1 must be a list"),
        (["x"], "instructions for B1 must be a list of objects"),
        ([{"instruction": "x", "instruction_options": []}], "instruction_attributes of an instruction for B1"),
        ([{"instruction": None, "instruction_attributes": ["a"], "instruction_options": []}], "instruction 0 for B1"),
        ([{"instruction": "x", "instruction_attributes": ["a"], "instruction_options": "red"}], "instruction_options"),
    ],
)
def test_odd_human_instructions(rows: Any, message: str) -> None:
    with pytest.raises(SpearError, match=message):
        load([make_record("B1")], {}, {"B1": rows}).goals("human")


def test_kinds() -> None:
    catalog = load([make_record("B1")], {"B1": make_entry("soft")})
    with pytest.raises(SpearError, match=r"goal_kind='human': the catalogue has no items_human_ins\.json"):
        catalog.goals("human")
    with pytest.raises(SpearError, match="goal_kind='x' is not valid"):
        catalog.goals("x")


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), "utf-8")
    return path


def test_broken_goals_files(tmp_path: Path) -> None:
    row = make_goal(make_product("B1"), "x", ("a",), (), 30.0, 1.0).to_row()
    for rows, message in (
        ((row, "{"), "row 1: broken JSON"),
        ((row, [1]), "row 1: a goal must be an object"),
        ((row, {"index": 3, **row}), "row 1: its index is 3"),
        (({**row, "price_upper": "30"},), "row 0: price_upper must be a number"),
        (({**row, "price_upper": float("inf")},), "row 0: price_upper must be a number"),
        (({**row, "price_upper": float("nan")},), "row 0: price_upper must be a number"),
        (({**row, "price_upper": 10**400},), "row 0: price_upper must be a number"),
        (({**row, "weight": -1},), "row 0: weight must be a number of at least 0"),
        (("[" * 100_000,), "row 0: broken JSON"),
        (({**row, "attributes": None},), "row 0: attributes must be a list of texts"),
        (({**row, "goal_options": None},), "row 0: goal_options must be a list of texts"),
        (({key: value for key, value in row.items() if key != "query"},), "row 0: query must be"),
        ((), "is empty: name a file"),
    ):
        with pytest.raises(SpearError, match=message):
            read_goals(write_rows(tmp_path / "goals.jsonl", *rows))
    with pytest.raises(SpearError, match=r"none\.jsonl does not exist"):
        read_goals(tmp_path / "none.jsonl")
    with pytest.raises(SpearError, match=r"cannot be read \(Is a directory\): name a goals file"):
        read_goals(tmp_path)
    (tmp_path / "goals.jsonl.xz").write_bytes(b"not packed")
    with pytest.raises(SpearError, match=r"goals\.jsonl\.xz, row 0: broken"):
        read_goals(tmp_path / "goals.jsonl.xz")


def test_prices_beside_a_goals_file(tmp_path: Path) -> None:
    assert read_prices(tmp_path / "goals.jsonl") == {}
    (tmp_path / "prices.json").write_text('{"B1": 3}')
    assert read_prices(tmp_path / "goals.jsonl") == {"B1": 3.0}
    for price in ('"3"', "true", "NaN", "-1", "1" + "0" * 400):
        (tmp_path / "prices.json").write_text(f'{{"B1": {price}}}')
        with pytest.raises(SpearError, match=r"prices\.json: the price of B1 must be a number of at least 0"):
            read_prices(tmp_path / "goals.jsonl")
    (tmp_path / "prices.json").write_text("[]")
    with pytest.raises(SpearError, match="must be an object of prices"):
        read_prices(tmp_path / "goals.jsonl")
