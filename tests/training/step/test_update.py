"""What the driver decides of an update, and how rows are dealt to mini-batches and ranks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import RowTable, SpearSettings, weigh_rows
from spear_training.algorithms.rows import Array
from spear_training.step.minibatches import Deal, count_minibatches, deal_rows
from spear_training.step.records import Rollout
from spear_training.step.state import SpearState
from spear_training.step.update import SEED_RANGE, Updater, UpdateSizes
from tests.training.step.actors import TableActor


class Update:
    """An update of ``fresh`` rows, and of as many replayed ones as are ``drawn``; ``extra`` columns are the fresh's."""

    def __init__(self, fresh: int, drawn: int = 0, *, ranks: int = 1, extra: Any = None, **nodes: Any) -> None:
        settings = SpearSettings.from_mapping(nodes)
        self.state, self.actor = SpearState(settings, seed=4), TableActor(settings, ranks=ranks)
        self.metrics: dict[str, Any] = {}
        sizes = UpdateSizes(rows_per_minibatch=8, scale_factor=16.0, epochs=3)
        self.updater = Updater(settings, self.state, self.actor, sizes)
        self.fresh, self.drawn = self.make_rows(fresh), None
        if drawn:
            rows = self.make_rows(drawn, first=fresh)
            self.drawn = self.actor.write(self.actor.read_tokens(rows).add(advantage=abs(rows.advantage)))
        self.fresh = self.fresh.add(**(extra(self.fresh) if extra else {}))
        self.repeat()

    def make_rows(self, count: int, *, first: int = 0) -> RowTable:
        random = np.random.default_rng(first + count)
        lengths = random.integers(1, 9, count)
        rows = RowTable(
            key=[f"k{first + n}" for n in range(count)],
            prompt_length=random.integers(1, 9, count),
            response_length=lengths,
            loss_tokens=random.integers(1, lengths + 1),
            advantage=random.normal(size=count),
        )
        return self.actor.collect(self.actor.play(Rollout((), rows), first).rows, {})

    def repeat(self) -> None:
        self.updater.update(self.fresh, self.drawn, 0.3, self.metrics)

    @property
    def passes(self) -> list[Any]:
        return self.actor.passes


@pytest.mark.parametrize("drawn", [4, 12, 40])
@pytest.mark.parametrize("ranks", [1, 2])
def test_joint_coupling_makes_no_further_optimiser_step(drawn: int, ranks: int) -> None:
    made = Update(24, drawn, ranks=ranks)
    (only,) = made.passes
    assert len(only.deal.minibatches) == 3 and len(only.rows) == 24 + drawn
    for part in only.deal.minibatches:
        replayed = sum(bool(only.rows.replayed[row]) for row in part if row >= 0)
        assert abs(replayed - drawn / 3) < 1
    assert made.metrics["actor/optimizer_steps"] == 3 * 3 and made.metrics["replay/n_sil"] == drawn / 24
    assert only.gamma == 0.3 and not only.hold_learning_rate
    # No micro-batch has more rows than a mini-batch without replay, nor is one cut more often than that asks for.
    assert only.deal.size <= 8 * only.pieces + ranks * only.pieces
    assert only.pieces == -(-(24 + drawn) // 24)


def test_sequential_coupling_makes_steps_of_its_own() -> None:
    made = Update(24, 13, sil={"coupling": "sequential"})
    own, other = made.passes
    assert [len(part.deal.minibatches) for part in made.passes] == [3, 2]
    assert own.hold_learning_rate and not other.hold_learning_rate
    assert not own.rows.replayed.any() and other.rows.replayed.all()
    assert made.metrics["replay/n_sil"] == pytest.approx(2 / 3) and made.metrics["replay/share"] == 13 / 37
    assert made.metrics["actor/lr"] == 0.7 and made.metrics["sil/actor/grad_norm"] > 0 > made.metrics["loss/sil"]


@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "token-mean", "sum-norm"])
def test_rows_weigh_what_they_do_in_their_mini_batch(mode: str) -> None:
    (only,) = Update(20, 9, ranks=3, loss={"aggregation": mode}).passes
    for part in only.deal.minibatches:
        rows = only.rows.take([row for row in part if row >= 0])
        expected = weigh_rows(rows.loss_tokens, rows.replayed, mode=mode, loss_scale_factor=16.0)
        assert rows.weight.tolist() == pytest.approx(expected.tolist())


def test_each_row_has_a_seed_of_its_own_and_each_update_others() -> None:
    made, same = Update(40), Update(40)
    seeds = made.passes[0].rows.seed
    assert len(set(seeds)) == 40 and 0 <= seeds.min() <= seeds.max() < SEED_RANGE
    assert same.passes[0].rows.seed.tolist() == seeds.tolist() and same.passes[0].deal == made.passes[0].deal
    made.repeat()
    assert made.passes[1].rows.seed.tolist() != seeds.tolist()


def test_replayed_rows_take_the_columns_of_fresh_ones() -> None:
    def widen(rows: RowTable) -> dict[str, Array]:
        ones = np.ones(len(rows.mask))
        return {"token_advantages": ones, "rollout_weights": 0.5 * ones}

    made = Update(6, 3, extra=widen)
    replayed = made.passes[0].rows.take(made.passes[0].rows.replayed)
    assert made.drawn is not None
    assert replayed.token_advantages.tolist() == made.drawn.spread(made.drawn.advantage).tolist()
    assert set(replayed.rollout_weights) == {1.0}, "there is no rollout to correct for"


def test_bounds_move_with_each_replay_and_are_given_to_the_next() -> None:
    made = Update(8, 4)
    assert made.passes[0].bounds is None and made.state.bounds is not None
    assert Update(8).state.bounds is None, "nothing was replayed"
    assert Update(8, 4, cov={"ratio": 0.0}).state.bounds is None
    first = made.state.bounds
    made.repeat()
    assert made.passes[1].bounds == first != made.state.bounds


# ---- dealing ---------------------------------------------------------------------------------------------------------
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
def test_every_row_is_dealt_once_and_each_rank_gets_its_share(case: Case) -> None:
    groups, lengths, options, seed = case
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
    for group in groups:
        counts = [len(set(part) & set(group)) for part in made.minibatches]
        assert max(counts) - min(counts) <= 1
    even, random = (deal((groups, lengths, options | {"balance": balance}, seed)) for balance in (True, False))
    assert [sorted(part) for part in even.minibatches] == [sorted(part) for part in random.minibatches]
    # verl cuts the batch into one block a rank, and each rank its block into mini-batches.
    ranks = options["shares"]
    blocks = np.asarray(made.order(ranks), dtype=np.int64).reshape(ranks, len(made.minibatches), made.size // ranks)
    for number, part in enumerate(made.minibatches):
        assert blocks[:, number].ravel().tolist() == list(part)


@pytest.mark.parametrize(("rows", "wanted"), [(0, 0), (1, 1), (11, 1), (13, 2), (16, 2), (19, 2), (21, 3)])
def test_minibatches_are_of_about_the_size_asked_for(rows: int, wanted: int) -> None:
    assert count_minibatches(rows, 8) == wanted


@pytest.mark.parametrize("seed", range(3))
def test_no_rank_waits_long_for_the_slowest(seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(6.8, 0.8, 256).astype(np.int64)  # as WebShop's rows
    for count in (1, 4):
        even, random = (
            deal_rows([range(256)], lengths, count=count, shares=4, rng=np.random.default_rng(2), balance=balance)
            for balance in (True, False)
        )
        assert 1.0 <= even.measure_balance(lengths, 4) <= random.measure_balance(lengths, 4)
        assert count > 1 or even.measure_balance(lengths, 4) <= 1.03


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
