from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import RowTable


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


def tell(rows: RowTable) -> list[Any]:
    """A table row by row."""
    ids, masks = rows.split("ids"), rows.split("mask")
    return [(key, i.tolist(), m.tolist()) for key, i, m in zip(rows.key, ids, masks, strict=True)]


SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_taken_rows_are_those_rows_in_that_order(sizes: list[tuple[int, int]], data: Any) -> None:
    rows = make(sizes)
    index = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    assert tell(rows.take(index)) == [tell(rows)[n] for n in index]
    flags = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    assert tell(rows.take(flags)) == [row for row, on in zip(tell(rows), flags, strict=True) if on]


@given(SIZES, SIZES)
def test_joined_tables_are_their_rows_in_order(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    tables = [make(one), make(other, first=len(one))]
    assert tell(RowTable.join(tables)) == [row for table in tables for row in tell(table)]


def test_a_table_is_its_columns_and_is_never_changed() -> None:
    rows = make([(2, 1), (1, 3)])
    richer = rows.add(reward=[1.0, -1.0])
    assert "reward" in richer and "reward" not in rows and len(richer) == 2
    assert richer.spread(richer.reward).tolist() == [1.0, -1.0, -1.0, -1.0]
    assert richer.select(["key", "reward", "advantage"]).columns == ("key", "reward")
    assert "ids" not in richer.drop("ids", "mask")
    assert RowTable.join([rows, richer]).columns == rows.columns, "what one of them lacks is left out"
    assert tell(pickle.loads(pickle.dumps(rows))) == tell(rows)
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
        turn_end=[3, 7, 2],
        turn_reward=[0.0, 1.0, 0.5],
        picture_bytes=[1, 2],
        pictures=[9, 7, 8],
    )
    second = rows.take([1])
    assert (second.turn_end.tolist(), second.turn_reward.tolist(), second.pictures.tolist()) == ([2], [0.5], [7, 8])


def test_rows_of_one_length_are_taken_as_others_are() -> None:
    for length in (0, 2):
        rows = RowTable(key=["a", "b", "c"], prompt_length=[1] * 3, response_length=[length] * 3,
                        mask=[n % 2 for n in range(3 * length)], ids=range(3 * (1 + length)))  # fmt: skip
        taken = rows.take([2, 0])
        assert taken.ids.tolist() == [*range(2 * (1 + length), 3 * (1 + length)), *range(1 + length)]
        assert taken.mask.tolist() == [n % 2 == 1 for n in (*range(2 * length, 3 * length), *range(length))]
        assert len(rows.take([]).ids) == 0
