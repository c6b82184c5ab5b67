"""Goals, their splits and task sets, and the mini catalogue."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.data.embedded import read_embedded
from spear_envs.webshop import goals as splits
from spear_envs.webshop.catalogue import Catalogue, open_catalogue
from spear_envs.webshop.goals import (
    Goal,
    GoalSource,
    ListedGoals,
    Positions,
    SplitScheme,
    make_goal,
    positions_from_json,
    positions_to_json,
    read_goals,
    read_prices,
    split_goals,
    write_goals,
)
from spear_envs.webshop.products import Product
from spear_envs.webshop.reward import Score, score_purchase
from tests.spear_envs.webshop.catalogues import load, make_entry, make_options, make_record
from tests.spear_envs.webshop.conftest import make_product


@given(st.integers(0, 30), st.integers(0, 30), st.sets(st.integers(0, 60)))
def test_positions_are_a_range_without_a_few(start: int, length: int, without: set[int]) -> None:
    positions = Positions(start, start + length, without)
    expected = [position for position in range(start, start + length) if position not in without]
    assert list(positions) == expected and len(positions) == len(expected)
    assert positions[::2] == expected[::2]
    assert [positions[i] for i in range(-len(expected), 0)] == expected
    with pytest.raises(IndexError):
        positions[len(expected)]
    assert list(positions_from_json(json.loads(json.dumps(positions_to_json(positions))))) == expected
    assert positions_from_json(positions_to_json(tuple(expected))) == tuple(expected)


def make_source(sizes: Sequence[int], repeats: Sequence[int]) -> GoalSource:
    """Goals of products with so many values in their option, some of them the same."""
    records, entries = [], {}
    for number, (size, repeat) in enumerate(zip(sizes, repeats, strict=True)):
        values = [f"v{i % max(1, size - repeat)}" for i in range(size)]
        asin = f"B{number:03d}"
        records.append(make_record(asin, customization_options=make_options(Size=values, Color=["red", "red"])))
        entries[asin] = make_entry("soft")
    return load(records, entries).goals()


sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=25)


def listed(source: GoalSource) -> list[Goal]:
    return [source.goal(position) for position in range(len(source))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of the original that small catalogues fill."""
    monkeypatch.setattr(splits, "TEST_GOALS", 10)
    monkeypatch.setattr(splits, "EVAL_GOALS", 15)
    monkeypatch.setattr(splits, "LEAST_SHARE", 5)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("scheme", [SplitScheme.ORIGINAL, SplitScheme.PRODUCT])
def test_splits_share_no_content(scheme: SplitScheme) -> None:
    @settings(max_examples=30)
    @given(sizes)
    def holds(drawn: list[tuple[int, int]]) -> None:
        source = make_source(*zip(*drawn, strict=True))
        made = split_goals(source, scheme)
        goals = listed(source)
        keys = {name: {goals[position].key for position in made[name]} for name in made}
        assert not keys["train"] & keys["eval"] and not keys["train"] & keys["test"] and not keys["eval"] & keys["test"]
        for positions in made.values():
            assert list(positions) == sorted(positions)
        if scheme is SplitScheme.PRODUCT:
            asins = [{goals[position].asin for position in made[name]} for name in made]
            assert sum(map(len, asins)) == len(set().union(*asins))
            assert sum(map(len, made.values())) == len(goals)

    holds()


@pytest.mark.usefixtures("short")
@settings(max_examples=30)
@given(sizes)
def test_a_duplicate_stays_in_the_first_split(drawn: list[tuple[int, int]]) -> None:
    source = make_source(*zip(*drawn, strict=True))
    goals = listed(source)
    made = split_goals(source, SplitScheme.ORIGINAL)
    seen: set[str] = set()
    start = 0
    for name, stop in (("test", 10), ("eval", 25), ("train", len(goals))):
        part = range(start, max(start, min(stop, len(goals))))
        assert list(made[name]) == [position for position in part if goals[position].key not in seen]
        seen |= {goals[position].key for position in part}
        start = part.stop


def test_shares_of_products() -> None:
    source = make_source([1] * 400, [0] * 400)  # two goals each, since both colours are red
    made = split_goals(source, SplitScheme.PRODUCT)
    assert {name: len(part) for name, part in made.items()} == {"train": 600, "eval": 100, "test": 100}
    # Another product elsewhere in the list moves none of those that are there.
    goals = listed(source)
    more = ListedGoals([make_goal(make_product("A1"), "x", ("a",), (), 30.0, 1.0), *goals])
    asins = {goals[position].asin for position in made["test"]}
    again = {more.goal(position).asin for position in split_goals(more, SplitScheme.PRODUCT)["test"]}
    assert len(asins & again) >= len(asins) - 1


def test_verl_agents_splits_overlap_by_content() -> None:
    source = make_source([6] * 100, [5] * 100)
    made = split_goals(source, SplitScheme.VERL_AGENT)
    assert (made["test"][0], made["test"][-1], made["train"][0], made["train"][-1]) == (0, 499, 500, 1199)
    keys = Counter(source.goal(position).key for name in ("test", "train") for position in made[name])
    assert max(keys.values()) > 1


def test_a_split_without_goals_says_which_to_take() -> None:
    catalogue = load([make_record("B1")], {"B1": make_entry("soft")})
    with pytest.raises(SpearError, match=r"split='train' has no goals .* choose 'test', or 'all'"):
        catalogue.make_tasks("train")
    with pytest.raises(SpearError, match="split='eval' has no goals under split_scheme='verl-agent'"):
        catalogue.make_tasks("eval", split_scheme="verl-agent")
    for split in ("valid", "validation", ""):
        if split:
            with pytest.raises(SpearError, match="choose one of 'train', 'eval', 'test', 'all'"):
                catalogue.make_tasks(split)
    with pytest.raises(SpearError, match="split_scheme='x' is not valid"):
        catalogue.make_tasks("test", split_scheme="x")


def make_catalogue() -> Catalogue:
    records = [make_record(f"B{i:03d}", customization_options=make_options(Size=["s", "m"])) for i in range(900)]
    records[3]["category"] = None
    return load(records, {record["asin"]: make_entry("soft") for record in records})


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return make_catalogue()


def test_tasks_describe_their_goals(catalogue: Catalogue) -> None:
    made = catalogue.make_tasks("test")
    assert len(made) == 500 and made.bounded
    task = made[17]
    assert task.id == "webshop/test/00017" and task.split == "test" and task.subtask == "garden"
    assert task.instruction == task.goal.instruction == catalogue.goals().goal(17).instruction
    assert Goal.from_row(json.loads(json.dumps(task.definition()))["content"]) == task.goal
    assert made.get("webshop/test/00017") is task and made.draw(np.random.default_rng(0)) in list(made)
    assert {task.subtask for task in catalogue.make_tasks("all")} == {"garden", "other"}


@pytest.mark.parametrize(
    "task_id", ["webshop/test/17", "webshop/train/00017", "webshop/test/00500", "webshop/test/-0001", "x", 17, "٠٠٠٠٠"]
)
def test_unknown_ids(catalogue: Catalogue, task_id: str) -> None:
    with pytest.raises(UnknownTaskError, match="run from 'webshop/test/00000' to 'webshop/test/00499'"):
        catalogue.make_tasks("test").get(task_id)


def test_fingerprints_cover_order_prices_text_and_tagger() -> None:
    def print_of(
        names: str = "ABC", pricing: str = "$1 - $9", text: str = "Find me x", **settings: object
    ) -> tuple[str, str]:
        records = [make_record(name, pricing=pricing) for name in names]
        entries = {name: make_entry("soft", instruction=text) for name in names}
        made = load(records, entries, **settings)
        return made.make_tasks("test").fingerprint, made.fingerprint

    from spear_envs.webshop.reward import find_tagger

    base = print_of()
    assert print_of() == base
    tagger = find_tagger("rule")._replace(name="another")
    for other in (print_of(pricing="$1 - $8"), print_of(price_seed=43), print_of(tagger=tagger), print_of("ABD")):
        assert other[0] != base[0] and other[1] != base[1]
    # The order of the file decides the order of the goals, and nothing else.
    shuffled = print_of("BCA")
    assert shuffled[0] != base[0] and shuffled[1] == base[1]
    assert print_of(text="Find me y")[0] != base[0]


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
    catalogue = load([record, make_record("B2")], {"B1": make_entry("soft", "durable"), "B2": {"attributes": ["soft"]}})
    source = catalogue.goals()
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


"""Of the records. A change of them makes a new catalogue: scores on it do not compare with those on the old one."""
CATEGORIES = {"beauty", "electronics", "fashion", "garden", "grocery"}

Records = tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def records() -> Records:
    data = read_embedded("webshop")
    return data["items"], data["attributes"], data["human"]


@pytest.fixture(scope="module")
def mini() -> Catalogue:
    return open_catalogue("mini")


@pytest.fixture(scope="module")
def products(mini: Catalogue) -> list[Product]:
    return [mini.product(number) for number in range(len(mini))]


@pytest.fixture(scope="module")
def goals_mini(mini: Catalogue) -> list[Goal]:
    return [mini.goals().goal(i) for i in range(len(mini.goals()))]


def buy(mini: Catalogue, goal: Goal, product: Product, options: dict[str, str]) -> Score:
    number, wanted = mini.number_of(product.asin), mini.number_of(goal.asin)
    assert number is not None and wanted is not None
    return score_purchase(goal, product, mini.price(number), options, mini.nouns(number), mini.nouns(wanted))


# ---------------------------------------------------------------- the same everywhere


# ---------------------------------------------------------------- what is in it


def test_goals_and_splits(mini: Catalogue, goals_mini: list[Goal]) -> None:
    assert len(goals_mini) >= 500
    owners = {}
    for kind in ("synthetic", "human"):
        for split in ("train", "eval", "test"):
            tasks = mini.make_tasks(split, goal_kind=kind)
            assert len(tasks) == 100 if split != "train" else len(tasks) >= 100
            assert {task.subtask for task in tasks} == CATEGORIES
            owners[split] = {task.content["asin"] for task in tasks}
        assert not owners["train"] & owners["eval"] | owners["train"] & owners["test"] | owners["eval"] & owners["test"]


# ---------------------------------------------------------------- what wins, and what does not


def test_the_wanted_product_wins(mini: Catalogue, goals_mini: list[Goal], products: list[Product]) -> None:
    for goal in goals_mini:
        number = mini.number_of(goal.asin)
        assert number is not None
        assert buy(mini, goal, mini.product(number), dict(goal.options)).reward == 1.0  # type: ignore[arg-type]


# ---------------------------------------------------------------- other sizes, and the cost
