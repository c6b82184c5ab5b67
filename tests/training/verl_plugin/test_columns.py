from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import RowTable
from spear_training.verl_plugin.queue import (
    FORWARD_COLUMNS,
    PICTURES,
    build_columns,
    find_predictions,
    nest_flat,
    pad_rows,
)


def unnest(column: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in column.unbind()]


def make_rows(**more: Any) -> RowTable:
    """Two rows: two tokens of prompt and three of response, and one of each."""
    return RowTable(prompt_length=[2, 1], response_length=[3, 1], ids=[5, 6, 7, 8, 9, 1, 2], mask=[1, 0, 1, 1], **more)


def test_columns_hold_prompt_and_response_without_padding() -> None:
    columns = build_columns(make_rows(rollout_log_probs=[-0.5, 0.0, -0.25, -1.0]))
    assert set(columns.keys()) == {*FORWARD_COLUMNS, "rollout_log_probs"}
    assert columns.batch_size == torch.Size([2])
    assert unnest(columns["input_ids"]) == [[5, 6, 7, 8, 9], [1, 2]]
    assert unnest(columns["position_ids"]) == [[0, 1, 2, 3, 4], [0, 1]]
    assert unnest(columns["loss_mask"]) == [[1, 0, 1], [1]]
    assert unnest(columns["rollout_log_probs"]) == [[-0.5, 0.0, -0.25], [-1.0]]
    assert {columns[name].dtype for name in FORWARD_COLUMNS} == {torch.int64}
    assert columns["rollout_log_probs"].dtype is torch.float32
    assert all(columns[name].layout is torch.jagged for name in columns.keys())  # noqa: SIM118


def test_what_the_rows_lack_or_have_besides_is_seen() -> None:
    assert set(build_columns(make_rows()).keys()) == set(FORWARD_COLUMNS), "a replayed row has no rollout"
    columns = build_columns(make_rows(picture_bytes=[1, 2], pictures=[9, 7, 8]))
    assert unnest(columns[PICTURES]) == [[9], [7, 8]] and columns[PICTURES].dtype is torch.uint8
    empty = build_columns(make_rows().take([]))
    assert empty.batch_size == torch.Size([0]) and not empty["input_ids"].values().numel()


def test_nest_flat_cuts_a_vector_into_rows_without_a_copy() -> None:
    values = torch.arange(6.0)
    nested = nest_flat(values, [1, 0, 3, 2])
    assert unnest(nested) == [[0.0], [], [1.0, 2.0, 3.0], [4.0, 5.0]]
    assert nested.values().data_ptr() == values.data_ptr()


@pytest.mark.parametrize("lengths", [[2, 3, 4], [4], [0, 3, 0], [0, 0]])
def test_a_padded_column_is_as_wide_as_its_longest_row(lengths: list[int]) -> None:
    padded = pad_rows(torch.ones(sum(lengths)), lengths)
    assert padded.shape == (len(lengths), max(lengths))
    assert padded.sum(1).tolist() == lengths


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_predictions_stand_one_to_the_left_of_the_response(sizes: list[tuple[int, int]]) -> None:
    expected, start = [], 0
    for prompt, response in sizes:
        expected += [start + prompt + k - 1 for k in range(response)]
        start += prompt + response
    prompts, lengths = np.asarray(sizes).T
    assert find_predictions(prompts, lengths).tolist() == expected
