from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms.rows import Array
from spear_training.step.dealing import Deal, count_minibatches, deal_rows

Case = tuple[list[list[int]], Array, dict[str, Any], int]


@st.composite
def deals(draw: Any) -> Case:
    """Two groups of rows, their lengths, options, and a seed."""
    fresh, replay = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    lengths = np.random.default_rng(draw(st.integers(0, 9))).integers(1, 500, fresh + replay)
    options = {"count": draw(st.integers(1, 6)), "shares": draw(st.integers(1, 4)), "balance": draw(st.booleans())}
    groups = [list(range(fresh)), list(range(fresh, fresh + replay))]
    return groups, lengths, options, draw(st.integers(0, 9))


def deal(case: Case) -> Deal:
    groups, lengths, options, seed = case
    return deal_rows(groups, lengths, **options, rng=np.random.default_rng(seed))


@given(deals())
def test_every_row_is_dealt_once_and_every_share_has_one_size(case: Case) -> None:
    groups, _, options, _ = case
    made = deal(case)
    dealt = [row for part in made.minibatches for row in part if row >= 0]
    assert sorted(dealt) == [row for group in groups for row in group]
    if not dealt:
        assert made == Deal((), 0)
        return
    assert len(made.minibatches) == options["count"]
    assert {len(part) for part in made.minibatches} == {made.size} and made.size % options["shares"] == 0
    assert made.padding == made.size * len(made.minibatches) - len(dealt)
    # No more padding than rounding up asks for.
    sizes = [sum(row >= 0 for row in part) for part in made.minibatches]
    assert made.size == -(-max(sizes) // options["shares"]) * options["shares"]


@given(deals())
def test_each_group_is_spread_evenly_over_the_minibatches(case: Case) -> None:
    made = deal(case)
    for group in case[0]:
        counts = [len(set(part) & set(group)) for part in made.minibatches]
        assert max(counts, default=0) - min(counts, default=0) <= 1


@given(deals())
def test_balance_moves_rows_between_shares_of_a_minibatch_alone(case: Case) -> None:
    groups, lengths, options, seed = case
    even, random = (deal((groups, lengths, options | {"balance": balance}, seed)) for balance in (True, False))
    assert [sorted(part) for part in even.minibatches] == [sorted(part) for part in random.minibatches]


@given(deals())
def test_order_gives_each_rank_its_share_of_every_minibatch(case: Case) -> None:
    made, ranks = deal(case), case[2]["shares"]
    order = made.order(ranks)
    assert len(order) == made.size * len(made.minibatches)
    # verl cuts the batch into one block a rank, and each rank its block into mini-batches.
    blocks = np.asarray(order, dtype=np.int64).reshape(ranks, len(made.minibatches), made.size // ranks)
    for number, part in enumerate(made.minibatches):
        assert blocks[:, number].ravel().tolist() == list(part)


@pytest.mark.parametrize(("rows", "wanted"), [(0, 0), (1, 1), (11, 1), (13, 2), (16, 2), (19, 2), (21, 3)])
def test_minibatches_are_of_about_the_size_asked_for(rows: int, wanted: int) -> None:
    assert count_minibatches(rows, 8) == wanted


# ---- balance ---------------------------------------------------------------------------------------------------------
def normal(rng: np.random.Generator, rows: int, mean: float, spread: float, least: int, most: int) -> Array:
    return rng.normal(mean, spread, rows).clip(least, most).astype(np.int64)


MIXES: dict[str, tuple[Any, int]] = {
    "math": (lambda rng: normal(rng, 512, 4000, 1500, 500, 16_000), 8),
    "ALFWorld": (lambda rng: normal(rng, 1024, 900, 250, 100, 2500), 8),
    "WebShop": (lambda rng: rng.lognormal(6.8, 0.8, 256).astype(np.int64), 4),
}
"""Lengths of rows, and the ranks that share them."""


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_waits_long_for_the_slowest(name: str, count: int, seed: int) -> None:
    draw, ranks = MIXES[name]
    lengths = draw(np.random.default_rng(seed))
    even, random = (
        deal_rows(
            [range(len(lengths))],
            lengths,
            count=count,
            shares=ranks,
            rng=np.random.default_rng(seed + 100),
            balance=balance,
        ).measure_balance(lengths, ranks)
        for balance in (True, False)
    )
    assert 1.0 <= even <= random
    if count == 1:  # in a small mini-batch one long row may be more than a share
        assert even <= 1.05


def test_the_balance_is_the_slowest_share_over_the_mean() -> None:
    made = Deal(((0, 1, 2, -1), (3, -1, 4, -1)), 4)
    lengths = np.asarray([1, 3, 2, 5, 5])
    # 4 against 2 tokens, whose mean is 3; then 5 against 5.
    assert made.measure_balance(lengths, 2) == pytest.approx((4 / 3 + 1) / 2)
    assert made.measure_balance(lengths, 1) == 1.0


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(2, 5))
def test_shares_differ_by_no_more_than_the_longest_row(lengths: list[int], shares: int) -> None:
    tokens = np.asarray(lengths)
    made = deal_rows([range(len(tokens))], tokens, count=1, shares=shares, rng=np.random.default_rng(0))
    padded = np.append(tokens, 0)[np.asarray(made.minibatches[0])].reshape(shares, -1).sum(1)
    assert padded.max() - padded.min() <= tokens.max()
