from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import check_disjoint
from spear_envs.webshop import splits
from spear_envs.webshop.goals import Goal, GoalSource, ListedGoals, make_goal
from spear_envs.webshop.splits import Positions, SplitScheme, positions_from_json, positions_to_json, split_goals
from tests.spear_envs.webshop.catalogs import load, make_entry, make_options, make_record
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


@settings(max_examples=30)
@given(sizes, st.data())
def test_twins_are_the_goals_with_equal_keys(drawn: list[tuple[int, int]], data: st.DataObject) -> None:
    source = make_source(*zip(*drawn, strict=True))
    goals = listed(source)
    chosen = data.draw(st.lists(st.integers(0, len(goals) - 1), max_size=5))
    keys = {goals[position].key for position in chosen}
    expected = {position for position, goal in enumerate(goals) if goal.key in keys}
    assert source.find_twins(chosen) == expected == ListedGoals(goals).find_twins(chosen)


@settings(max_examples=30)
@given(sizes)
def test_owners_name_the_products(drawn: list[tuple[int, int]]) -> None:
    source = make_source(*zip(*drawn, strict=True))
    for some in (source, ListedGoals(listed(source))):
        names = [some.owner_name(int(number)) for number in some.owners()]
        assert names == [goal.asin for goal in listed(source)]


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
    catalog = load([make_record("B1")], {"B1": make_entry("soft")})
    with pytest.raises(SpearError, match=r"split='train' has no goals .* choose 'test', or 'all'"):
        catalog.make_tasks("train")
    with pytest.raises(SpearError, match="split='eval' has no goals under split_scheme='verl-agent'"):
        catalog.make_tasks("eval", split_scheme="verl-agent")
    for split in ("valid", "validation", ""):
        if split:
            with pytest.raises(SpearError, match="choose one of 'train', 'eval', 'test', 'all'"):
                catalog.make_tasks(split)
    with pytest.raises(SpearError, match="split_scheme='x' is not valid"):
        catalog.make_tasks("test", split_scheme="x")


def test_task_sets_of_both_disjoint_schemes() -> None:
    records = [make_record(f"B{i:03d}", customization_options=make_options(Size=["s", "m", "s"])) for i in range(700)]
    catalog = load(records, {record["asin"]: make_entry("soft") for record in records})
    for scheme in ("original", "product"):
        sets = [catalog.make_tasks(split, split_scheme=scheme) for split in ("train", "eval", "test")]
        assert check_disjoint(*sets) == sum(map(len, sets))
    with pytest.raises(SpearError, match="splits overlap"):
        check_disjoint(*(catalog.make_tasks(split, split_scheme="verl-agent") for split in ("train", "test")))
