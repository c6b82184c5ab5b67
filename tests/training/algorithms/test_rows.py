"""Tables of rows, and the filters that take rows out."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import RowTable, has_repetition, keep_high_variance_groups, overlong_mask, void_turn_mask
from tests.training.algorithms.batches import tensor


def make(sizes: list[tuple[int, int]], first: int = 0) -> RowTable:
    """Rows of P + R tokens whose ids say which row and place they are of."""
    ids = [100 * (first + n) + k for n, (prompt, response) in enumerate(sizes) for k in range(prompt + response)]
    return RowTable(
        key=[f"r{first + n}" for n in range(len(sizes))],
        prompt_length=[prompt for prompt, _ in sizes],
        response_length=[response for _, response in sizes],
        ids=ids,
        mask=[k % 2 == 0 for _, response in sizes for k in range(response)],
    )


def report(rows: RowTable) -> list[Any]:
    """A table row by row."""
    ids, masks = rows.split("ids"), rows.split("mask")
    return [(key, i.tolist(), m.tolist()) for key, i, m in zip(rows.key, ids, masks, strict=True)]


SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_taken_rows_are_those_rows_in_that_order(sizes: list[tuple[int, int]], data: Any) -> None:
    rows = make(sizes)
    index = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    assert report(rows.take(index)) == [report(rows)[n] for n in index]
    flags = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    assert report(rows.take(flags)) == [row for row, on in zip(report(rows), flags, strict=True) if on]


@given(SIZES, SIZES)
def test_joined_tables_are_their_rows_in_order(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    tables = [make(one), make(other, first=len(one))]
    assert report(RowTable.join(tables)) == [row for table in tables for row in report(table)]


def test_a_table_is_its_columns_and_is_never_changed() -> None:
    rows = make([(2, 1), (1, 3)])
    richer = rows.add(reward=[1.0, -1.0])
    assert "reward" in richer and "reward" not in rows and len(richer) == 2
    assert richer.spread(richer.reward).tolist() == [1.0, -1.0, -1.0, -1.0]
    assert richer.select(["key", "reward", "advantage"]).columns == ("key", "reward")
    assert "ids" not in richer.drop("ids", "mask")
    assert RowTable.join([rows, richer]).columns == rows.columns, "what one of them lacks is left out"
    assert report(pickle.loads(pickle.dumps(rows))) == report(rows)
    with pytest.raises(AttributeError, match="no column 'advantage'"):
        _ = rows.advantage


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward": [1.0], "advantage": [1.0, 2.0]}, "one number of rows"),
        ({"prompt_length": [1], "response_length": [2], "mask": [1]}, "column mask has 1 entries, its rows have 2"),
        ({"rewards": [1.0]}, "'rewards' is not a column"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowTable(**columns)
    with pytest.raises(ValueError, match="no table"):
        RowTable.join([])


def test_spans_of_turns_and_pictures_travel_with_their_rows() -> None:
    rows = RowTable(
        key=["a", "b"],
        turns=[2, 1],
        turn_number=[0, 2, 1],
        turn_end=[3, 7, 2],
        turn_reward=[0.0, 1.0, 0.5],
        picture_bytes=[1, 2],
        pictures=[9, 7, 8],
    )
    second = rows.take([1])
    assert second.turn_number.tolist() == [1]
    assert (second.turn_end.tolist(), second.turn_reward.tolist(), second.pictures.tolist()) == ([2], [0.5], [7, 8])


def test_rows_of_one_length_are_taken_as_others_are() -> None:
    for length in (0, 2):
        rows = RowTable(key=["a", "b", "c"], prompt_length=[1] * 3, response_length=[length] * 3,
                        mask=[n % 2 for n in range(3 * length)], ids=range(3 * (1 + length)))  # fmt: skip
        taken = rows.take([2, 0])
        assert taken.ids.tolist() == [*range(2 * (1 + length), 3 * (1 + length)), *range(1 + length)]
        assert taken.mask.tolist() == [n % 2 == 1 for n in (*range(2 * length, 3 * length), *range(length))]
        assert len(rows.take([]).ids) == 0


def test_high_variance_groups_by_hand() -> None:
    rewards = tensor([0.0, 0.5, 1.0, 0.0, 0.5, -1.0, 1.0, 1.0])
    ids = ["flat", "mid", "wide", "flat", "mid", "wide", "tie", "tie"]
    assert keep_high_variance_groups(rewards, ids, ratio=0.25).tolist() == [name == "wide" for name in ids]
    # of three groups without spread, the one seen first stays
    assert keep_high_variance_groups(rewards, ids, ratio=0.5).tolist() == [name in ("wide", "flat") for name in ids]


def test_group_filter_ignores_invalid_rows_and_counts_trajectories_once() -> None:
    rewards = tensor([1.0, 1.0, 9.0, 0.0, 1.0, 2.0])
    ids = ["a", "a", "a", "b", "b", "c"]
    got = keep_high_variance_groups(rewards, ids, ratio=0.5, valid=[1, 1, 0, 1, 1, 0])
    assert got.tolist() == [False, False, False, True, True, False]
    assert not keep_high_variance_groups(rewards, ids, valid=[0] * 6).any()
    # rows 4, 0, 0, 0 spread less as trajectories (4, 0) of equal weight than as rows, and b overtakes
    rewards, ids = tensor([4.0, 0.0, 0.0, 0.0, 3.9, 0.0]), ["a"] * 4 + ["b"] * 2
    got = keep_high_variance_groups(rewards, ids, ratio=0.5, trajectory_ids=[0, 1, 1, 1, 0, 1])
    assert got.tolist() == [True] * 4 + [False] * 2
    assert keep_high_variance_groups(rewards, ids, ratio=0.5).tolist() == [False] * 4 + [True] * 2


@given(
    st.lists(st.lists(st.sampled_from([-1.0, -0.9, 0.3, 1.1]), min_size=2, max_size=6), min_size=1, max_size=12),
    st.floats(0.05, 1),
    st.randoms(use_true_random=False),
)
def test_group_filter_keeps_whole_groups_of_largest_spread(groups, ratio: float, random) -> None:
    rows = [(name, reward) for name, members in enumerate(groups) for reward in members]
    random.shuffle(rows)
    ids = [name for name, _ in rows]
    kept = keep_high_variance_groups(tensor([reward for _, reward in rows]), ids, ratio=ratio).tolist()
    chosen = {name for name, keep in zip(ids, kept, strict=True) if keep}
    assert all(keep == (name in chosen) for name, keep in zip(ids, kept, strict=True))
    assert len(chosen) == max(1, math.floor(ratio * len(groups) + 1e-9))
    spread = [float(np.std(members)) for members in groups]
    dropped = [spread[name] for name in set(ids) - chosen]
    assert not dropped or min(spread[name] for name in chosen) >= max(dropped) - 1e-8
    first_seen = list(dict.fromkeys(ids))
    for name in chosen:  # ties go to the group seen first
        earlier = first_seen[: first_seen.index(name)]
        assert all(other in chosen for other in earlier if abs(spread[other] - spread[name]) < 1e-12)


def test_overlong_by_hand() -> None:
    lengths = torch.tensor([10, 512, 512, 513])
    assert overlong_mask(lengths, 512).tolist() == [False, True, True, True]
    assert overlong_mask(lengths, 512, finished=torch.tensor([0, 1, 0, 1])).tolist() == [False, False, True, True]


def test_void_turns_by_hand() -> None:
    void, ids = torch.tensor([0, 1, 0, 0]), ["A", "B", "A", "B"]
    assert void_turn_mask(void, ids).tolist() == [False, True, False, True]
    assert void_turn_mask(void, ids, scope="turn").tolist() == [False, True, False, False]
    assert void_turn_mask(void, ids, scope="off").tolist() == [False] * 4
    with pytest.raises(ValueError, match="trajectory_ids has 1"):
        void_turn_mask(void, ["A"])
    with pytest.raises(ValueError):
        void_turn_mask(void, ids, scope="episode")


def test_repetition_by_hand() -> None:
    assert not has_repetition([1] * 28)
    assert has_repetition([1] * 29)  # ten windows of twenty
    assert not has_repetition(range(500))
    assert has_repetition([1, 2, 9, 1, 2, 8, 1, 2], ngram=2, times=3)
    assert not has_repetition([], ngram=1, times=1) and has_repetition([4], ngram=1, times=1)
    with pytest.raises(ValueError, match="1 or more"):
        has_repetition([1], ngram=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_repetition_equals_a_plain_count(ids: list[int], ngram: int, times: int, as_tensor: bool) -> None:
    windows = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
    want = any(windows.count(window) >= times for window in windows)
    assert has_repetition(torch.tensor(ids) if as_tensor else ids, ngram=ngram, times=times) is want
