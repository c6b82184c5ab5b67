from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import Aggregation, aggregate_loss
from spear_training.verl_plugin.batch import (
    TOKEN_COLUMNS,
    Deal,
    RowTokens,
    build_columns,
    count_pieces,
    deal_rows,
    find_predictions,
    nest_flat,
    weigh_rows,
)

WEIGHED = [mode for mode in Aggregation if mode is not Aggregation.SUM_NORM]


# ---- columns ---------------------------------------------------------------------------------------------------------
def unnest(column: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in column.unbind()]


def test_columns_hold_prompt_and_response_without_padding() -> None:
    rows = [
        RowTokens([5, 6], [7, 8, 9], [1, 0, 1], [-0.5, 0.0, -0.25]),
        RowTokens((1,), (2,), (1,), (-1.0,)),
    ]
    columns = build_columns(rows)
    assert set(columns.keys()) == set(TOKEN_COLUMNS)
    assert columns.batch_size == torch.Size([2])
    assert unnest(columns["input_ids"]) == [[5, 6, 7, 8, 9], [1, 2]]
    assert unnest(columns["position_ids"]) == [[0, 1, 2, 3, 4], [0, 1]]
    assert unnest(columns["loss_mask"]) == [[1, 0, 1], [1]]
    assert unnest(columns["rollout_log_probs"]) == [[-0.5, 0.0, -0.25], [-1.0]]
    assert {columns[name].dtype for name in TOKEN_COLUMNS[:-1]} == {torch.int64}
    assert columns["rollout_log_probs"].dtype is torch.float32
    assert all(columns[name].layout is torch.jagged for name in TOKEN_COLUMNS)


def test_columns_take_what_the_replay_buffer_gives() -> None:
    row = RowTokens(
        np.asarray([1, 2], np.int32), np.asarray([3], np.int32), np.asarray([1], np.uint8), np.asarray([-0.5], "f4")
    )
    columns = build_columns([row])
    assert unnest(columns["input_ids"]) == [[1, 2, 3]]
    assert columns["input_ids"].dtype is torch.int64


def test_nest_flat_cuts_a_vector_into_rows_without_a_copy() -> None:
    values = torch.arange(6.0)
    nested = nest_flat(values, [1, 0, 3, 2])
    assert unnest(nested) == [[0.0], [], [1.0, 2.0, 3.0], [4.0, 5.0]]
    assert nested.values().data_ptr() == values.data_ptr()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_predictions_stand_one_to_the_left_of_the_response(sizes: list[tuple[int, int]]) -> None:
    expected, start = [], 0
    for prompt, response in sizes:
        expected += [start + prompt + k - 1 for k in range(response)]
        start += prompt + response
    prompts, lengths = np.asarray(sizes).T
    assert find_predictions(prompts, lengths).tolist() == expected


@pytest.mark.parametrize("lengths", [[2, 3, 4], [4], [0, 3, 0], [0, 0], []])
def test_a_padded_column_is_as_wide_as_its_longest_row(lengths: list[int]) -> None:
    nested = nest_flat(torch.ones(sum(lengths)), lengths)
    if lengths:
        padded = torch.nested.to_padded_tensor(nested, 0.0)
        assert padded.shape == (len(lengths), max(lengths))
        assert padded.sum(1).tolist() == lengths
    assert nested.shape[0] == len(lengths)


# ---- dealing ---------------------------------------------------------------------------------------------------------
@st.composite
def deals(draw: Any) -> tuple[list[list[int]], int, int, int]:
    fresh, replay = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    groups = [list(range(fresh)), list(range(fresh, fresh + replay))]
    return [g for g in groups if g], draw(st.integers(2, 40)), draw(st.integers(1, 4)), draw(st.integers(0, 9))


@given(deals())
def test_every_row_is_dealt_once_and_every_minibatch_has_one_size(case: tuple[list[list[int]], int, int, int]) -> None:
    groups, wanted, ranks, seed = case
    deal = deal_rows(groups, wanted, ranks, np.random.default_rng(seed))
    dealt = [row for part in deal.minibatches for row in part if row >= 0]
    assert sorted(dealt) == [row for group in groups for row in group]
    assert {len(part) for part in deal.minibatches} <= {deal.size}
    assert deal.size % ranks == 0
    assert deal.padding == deal.size * len(deal.minibatches) - len(dealt)
    if not groups:
        return
    assert len(deal.minibatches) == max(1, round(len(dealt) / wanted))
    # No optimiser step without a row, and no more padding than rounding up asks for.
    sizes = [sum(row >= 0 for row in part) for part in deal.minibatches]
    assert min(sizes) > 0
    assert deal.size == math.ceil(max(sizes) / ranks) * ranks
    assert max(sizes) - min(sizes) <= len(groups)


@given(deals())
def test_each_group_is_spread_evenly_over_the_minibatches(case: tuple[list[list[int]], int, int, int]) -> None:
    groups, wanted, ranks, seed = case
    deal = deal_rows(groups, wanted, ranks, np.random.default_rng(seed))
    for group in groups:
        shares = [len(set(part) & set(group)) for part in deal.minibatches]
        assert max(shares) - min(shares) <= 1


@given(deals())
def test_a_deal_follows_from_the_state_of_the_stream(case: tuple[list[list[int]], int, int, int]) -> None:
    groups, wanted, ranks, seed = case
    first, second = (np.random.default_rng(seed) for _ in range(2))
    assert deal_rows(groups, wanted, ranks, first) == deal_rows(groups, wanted, ranks, second)
    assert first.bit_generator.state == second.bit_generator.state


@given(deals())
def test_order_gives_each_rank_its_share_of_every_minibatch(case: tuple[list[list[int]], int, int, int]) -> None:
    groups, wanted, ranks, seed = case
    deal = deal_rows(groups, wanted, ranks, np.random.default_rng(seed))
    order = deal.order(ranks)
    assert len(order) == deal.size * len(deal.minibatches)
    if not order:
        return
    # verl cuts the batch into one block a rank, and each rank its block into mini-batches.
    blocks = np.asarray(order).reshape(ranks, len(deal.minibatches), deal.size // ranks)
    for number, part in enumerate(deal.minibatches):
        assert blocks[:, number].ravel().tolist() == list(part)


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 4))
def test_no_piece_of_a_minibatch_has_more_rows_than_a_rank_should_have(rows: int, wanted: int, ranks: int) -> None:
    pieces = count_pieces(rows, wanted)
    deal = deal_rows([range(rows)], wanted, ranks * pieces, np.random.default_rng(0))
    assert deal.size // (ranks * pieces) <= math.ceil(wanted / ranks)
    assert pieces <= 2, "a mini-batch has at most half as many rows again as it should"
    if rows % wanted == 0:
        assert pieces == 1


def test_rows_change_places_from_step_to_step() -> None:
    rng = np.random.default_rng(0)
    deals = [deal_rows([range(64)], 16, 1, rng).minibatches for _ in range(3)]
    assert len({part for deal in deals for part in deal}) == 12


def test_no_rows_make_no_minibatch() -> None:
    assert deal_rows([], 8, 2, np.random.default_rng(0)) == Deal((), 0)
    assert Deal((), 0).order(2) == []


# ---- weights ---------------------------------------------------------------------------------------------------------
@st.composite
def weighings(draw: Any) -> tuple[list[list[int]], list[int], list[bool]]:
    n = draw(st.integers(1, 12))
    tokens = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    replay = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    count = draw(st.integers(1, 3))
    order = draw(st.permutations(range(n)))
    parts = [[*order[k::count], *[-1] * draw(st.integers(0, 2))] for k in range(count)]
    return parts, tokens, replay


def weigh_naively(
    minibatches: list[list[int]], tokens: list[int], replay: list[bool], mode: Aggregation, scale: float
) -> list[float]:
    weights = [0.0] * len(tokens)
    for part in minibatches:
        for row in part:
            if row < 0 or not tokens[row]:
                continue
            same = [r for r in part if r >= 0 and tokens[r] and replay[r] == replay[row]]
            weights[row] = {
                Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: 1 / (len(same) * scale),
                Aggregation.SEQ_MEAN_TOKEN_SUM: 1 / len(same),
                Aggregation.SEQ_MEAN_TOKEN_MEAN: 1 / (len(same) * tokens[row]),
                Aggregation.TOKEN_MEAN: 1 / sum(tokens[r] for r in same),
            }[mode]
    return weights


@pytest.mark.parametrize("mode", WEIGHED)
@given(case=weighings())
def test_weights_are_those_of_a_plain_loop(
    mode: Aggregation, case: tuple[list[list[int]], list[int], list[bool]]
) -> None:
    parts, tokens, replay = case
    weights = weigh_rows(parts, tokens, replay, aggregation=mode, scale_factor=7.0)
    np.testing.assert_allclose(weights, weigh_naively(parts, tokens, replay, mode, 7.0), rtol=1e-12)


@pytest.mark.parametrize("mode", WEIGHED)
@given(case=weighings(), seed=st.integers(0, 99))
def test_weighed_rows_sum_to_the_aggregated_loss_of_either_term(
    mode: Aggregation, case: tuple[list[list[int]], list[int], list[bool]], seed: int
) -> None:
    parts, tokens, replay = case
    weights = weigh_rows(parts, tokens, replay, aggregation=mode, scale_factor=7.0)
    loss = torch.randn(len(tokens), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.arange(5)[None] < torch.tensor(tokens)[:, None]
    sums = torch.where(mask, loss, 0.0).sum(1)
    for part in parts:
        for kind in (False, True):
            rows = [row for row in part if row >= 0 and replay[row] == kind]
            if not rows:
                continue
            expected = aggregate_loss(loss[rows], mask[rows], mode=mode.value, loss_scale_factor=7.0)
            assert float(torch.from_numpy(weights)[rows] @ sums[rows]) == pytest.approx(float(expected), abs=1e-12)


def test_an_aggregation_that_depends_on_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="sum-norm"):
        weigh_rows([[0]], [1], [False], aggregation=Aggregation.SUM_NORM, scale_factor=1.0)
