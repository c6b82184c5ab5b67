"""The executable specification of an update: verl's workers compute ``spear_training.algorithms.spear_loss``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from spear_training.algorithms import Estimator, SpearSettings, kl_divergence, spear_loss
from spear_training.verl_plugin.batch import RowTokens, build_columns, nest_flat, weigh_rows
from spear_training.verl_plugin.loss import (
    ADVANTAGES,
    REFERENCE,
    STEERING,
    RowLoss,
    actor_loss,
    compute_row_loss,
    list_token_columns,
)

LENGTH = 9
GAMMA = 0.37
BOUNDS = (-0.5, 0.5)
"""Wide enough for many candidates."""


@dataclass
class Batch:
    """One mini-batch: columns [B, T] of tokens and columns [B] of rows."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    replay: Tensor
    seeds: Tensor
    token_advantages: Tensor
    """[B, T]: as PPO has them."""
    ref_log_probs: Tensor

    def own_advantages(self, settings: SpearSettings) -> Tensor:
        """[B, T] with PPO, where a replayed row has one advantage for all its tokens; else [B]."""
        if settings.advantage.estimator is not Estimator.GAE:
            return self.advantages
        return torch.where(self.replay[:, None], self.advantages[:, None], self.token_advantages)

    def steering(self, settings: SpearSettings, gamma: float = GAMMA) -> Tensor:
        """The column that the driver writes, gamma in the weights of replayed rows."""
        weights = weigh_rows(
            [range(len(self.mask))],
            self.mask.sum(1).tolist(),
            self.replay.tolist(),
            aggregation=settings.loss.aggregation,
            scale_factor=float(LENGTH),
        )
        weights = torch.from_numpy(np.where(self.replay, gamma * weights, weights))
        return torch.stack([self.advantages, weights, self.replay.double(), self.seeds], 1)

    def compute(
        self, settings: SpearSettings, rows: Any = slice(None), *, gamma: float = GAMMA
    ) -> tuple[RowLoss, Tensor]:
        """The plugin's loss of ``rows`` and its gradient with respect to their log-probs."""
        log_probs = self.log_probs[rows].clone().requires_grad_()
        result = compute_row_loss(
            settings,
            log_probs,
            self.old_log_probs[rows],
            self.mask[rows],
            self.steering(settings, gamma)[rows],
            BOUNDS,
            advantages=self.own_advantages(settings)[rows] if settings.advantage.estimator is Estimator.GAE else None,
            ref_log_probs=self.ref_log_probs[rows] if settings.kl.coefficient > 0 else None,
        )
        result.total.backward()
        assert log_probs.grad is not None
        return result, log_probs.grad

    def specify(self, settings: SpearSettings, *, gamma: float = GAMMA) -> tuple[Any, Tensor]:
        """The paper's loss of the same mini-batch and its gradient."""
        log_probs = self.log_probs.clone().requires_grad_()
        clip, cov = settings.clip, settings.cov
        result = spear_loss(
            log_probs,
            self.old_log_probs,
            self.own_advantages(settings),
            self.mask,
            self.replay,
            gamma=gamma,
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            max_log_ratio=clip.max_log_ratio,
            cov_ratio=cov.ratio,
            cov_lower=BOUNDS[0],
            cov_upper=BOUNDS[1],
            cov_scope=cov.scope.value,
            cov_budget=cov.budget.value,
            cov_floor_one=cov.floor_one,
            on_policy_cov=(cov.on_policy_ratio, cov.on_policy_lower, cov.on_policy_upper) if cov.on_policy else None,
            mode=settings.loss.aggregation.value,
            loss_scale_factor=float(LENGTH),
            ref_log_probs=self.ref_log_probs,
            kl_coefficient=settings.kl.coefficient,
            generator=torch.Generator().manual_seed(int(self.seeds.sum())),
        )
        result.loss.backward()
        assert log_probs.grad is not None
        return result, log_probs.grad


def draw_batch(seed: int = 0, *, fresh: int = 7, replayed: int = 5, spread: float = 0.6) -> Batch:
    """Rows of random lengths, one of each kind without a loss token; ratios far enough from 1 for every clip."""
    rows, random = fresh + replayed, torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(rows, LENGTH, generator=random, dtype=torch.float64)
    replay = torch.arange(rows) >= fresh
    advantages = torch.randn(rows, generator=random, dtype=torch.float64)
    advantages = torch.where(replay, advantages.abs(), advantages)
    mask = torch.rand(rows, LENGTH, generator=random) < 0.8
    mask[0] = mask[-1] = False
    return Batch(
        log_probs=old + spread * torch.randn(rows, LENGTH, generator=random, dtype=torch.float64),
        old_log_probs=old,
        advantages=advantages,
        mask=mask,
        replay=replay,
        seeds=torch.randint(2**20, (rows,), generator=random).double(),
        token_advantages=torch.randn(rows, LENGTH, generator=random, dtype=torch.float64),
        ref_log_probs=old + spread * torch.randn(rows, LENGTH, generator=random, dtype=torch.float64),
    )


def choose(**nodes: Any) -> SpearSettings:
    return SpearSettings.from_mapping(nodes)


NO_COV = {"ratio": 0.0}
CASES = {
    "covariance clip off": choose(cov=NO_COV),
    "covariance clip of a tenth": choose(cov={"ratio": 0.1}),
    "by trajectory": choose(cov={"ratio": 0.3, "budget": "trajectory", "floor_one": True}),
    "by position": choose(cov={"ratio": 0.3, "scope": "position"}),
    "on-policy clip too": choose(
        cov={
            "ratio": 0.1,
            "on_policy": True,
            "on_policy_ratio": 0.2,
            "on_policy_lower": -1.0,
            "on_policy_upper": 1.0,
        }
    ),
    "on-policy clip alone": choose(
        cov={
            "ratio": 0.0,
            "on_policy": True,
            "on_policy_ratio": 0.2,
            "on_policy_lower": -1.0,
            "on_policy_upper": 1.0,
        }
    ),
    "no dual clip, no clamp": choose(cov=NO_COV, clip={"dual": None, "max_log_ratio": None}),
    "narrow clips": choose(cov=NO_COV, clip={"low": 0.02, "high": 0.03, "dual": 1.1, "max_log_ratio": 0.5}),
    "KL to a reference": choose(cov={"ratio": 0.1}, kl={"coefficient": 0.2}),
    "advantages of tokens": choose(cov={"ratio": 0.1}, advantage={"estimator": "gae"}),
    "PPO with KL": choose(
        cov=NO_COV,
        kl={"coefficient": 0.05},
        advantage={"estimator": "gae"},
        loss={"aggregation": "token-mean"},
    ),
    "token-mean": choose(cov=NO_COV, loss={"aggregation": "token-mean"}),
    "seq-mean-token-mean": choose(cov=NO_COV, loss={"aggregation": "seq-mean-token-mean"}),
    "seq-mean-token-sum": choose(cov=NO_COV, loss={"aggregation": "seq-mean-token-sum"}),
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_paper(settings: SpearSettings, seed: int) -> None:
    batch = draw_batch(seed)
    (found, gradient), (expected, wanted) = batch.compute(settings), batch.specify(settings)
    assert found.total.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    assert float(found.on_policy) == pytest.approx(float(expected.on_policy), abs=1e-6)
    assert float(found.self_imitation) == pytest.approx(GAMMA * float(expected.self_imitation), abs=1e-6)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=0)
    assert gradient.abs().max() > 1e-3
    tokens = float(found.tokens)
    assert float(found.clipped) / tokens == pytest.approx(float(expected.clip_fraction))
    assert float(found.dual_clipped) / tokens == pytest.approx(float(expected.dual_fraction))
    if not settings.cov.on_policy:
        share = float(found.covariance_clipped) / max(1.0, float(found.replay_tokens))
        assert share == pytest.approx(float(expected.cov_fraction))


def test_the_cases_above_reach_every_clip() -> None:
    found = draw_batch(0).compute(CASES["narrow clips"])[0]
    assert found.clipped > 0 and found.dual_clipped > 0
    assert draw_batch(0).compute(CASES["covariance clip of a tenth"])[0].covariance_clipped > 0
    assert draw_batch(0).compute(CASES["on-policy clip alone"])[0].covariance_clipped > 0


@pytest.mark.parametrize("kinds", [{"fresh": 0}, {"replayed": 0}], ids=["replay only", "on-policy only"])
@pytest.mark.parametrize("settings", [CASES["covariance clip off"], CASES["on-policy clip too"]], ids=["off", "on"])
def test_either_term_may_be_absent(kinds: dict[str, int], settings: SpearSettings) -> None:
    batch = draw_batch(4, **kinds)
    (found, gradient), (expected, wanted) = batch.compute(settings), batch.specify(settings)
    assert found.total.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=0)
    absent = found.on_policy if "fresh" in kinds else found.self_imitation
    assert float(absent) == 0.0


def test_the_divergence_is_counted_and_needs_a_reference() -> None:
    settings, batch = CASES["KL to a reference"], draw_batch(3)
    expected = kl_divergence(batch.log_probs, batch.ref_log_probs)[batch.mask].sum()
    assert float(batch.compute(settings)[0].kl) == pytest.approx(float(expected))
    assert float(batch.compute(CASES["covariance clip off"])[0].kl) == 0.0
    with pytest.raises(ValueError, match="reference policy"):
        compute_row_loss(settings, batch.log_probs, batch.old_log_probs, batch.mask, batch.steering(settings), BOUNDS)


def test_a_batch_of_padding_alone_has_loss_and_gradient_zero() -> None:
    batch = draw_batch(5)
    batch.mask[:] = False
    found, gradient = batch.compute(CASES["covariance clip of a tenth"])
    assert found.total.item() == 0.0 and not gradient.any()
    assert float(found.tokens) == 0.0


@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_micro_batches_add_up_to_the_minibatch(mode: str, size: int) -> None:
    settings = choose(cov=NO_COV, loss={"aggregation": mode})
    batch = draw_batch(6)
    whole, gradient = batch.compute(settings)
    parts = [batch.compute(settings, slice(start, start + size)) for start in range(0, 12, size)]
    assert sum(loss.total.item() for loss, _ in parts) == pytest.approx(whole.total.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), gradient, atol=1e-12, rtol=0)
    for name in ("on_policy", "self_imitation", "tokens", "replay_tokens", "clipped", "dual_clipped"):
        assert sum(float(getattr(loss, name)) for loss, _ in parts) == pytest.approx(float(getattr(whole, name)))


def test_gamma_in_the_weights_is_gamma_in_the_loss() -> None:
    batch, settings = draw_batch(7), CASES["covariance clip off"]
    for gamma in (0.0, 0.1, 1.0):
        (found, gradient), (expected, wanted) = (
            batch.compute(settings, gamma=gamma),
            batch.specify(settings, gamma=gamma),
        )
        assert found.total.item() == pytest.approx(expected.loss.item(), abs=1e-9)
        torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0)


def test_the_covariance_choice_follows_from_the_seeds_of_the_rows() -> None:
    batch, settings = draw_batch(8), CASES["covariance clip of a tenth"]
    before = torch.get_rng_state()
    first, second = batch.compute(settings)[1], batch.compute(settings)[1]
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    others = [replace(batch, seeds=batch.seeds + k).compute(settings)[1] for k in range(1, 5)]
    assert any(not torch.equal(first, other) for other in others)
    assert torch.equal(before, torch.get_rng_state()), "the global stream belongs to others"


def test_inputs_are_left_as_they_were() -> None:
    batch = draw_batch(9)
    copies = [value.clone() for value in vars(batch).values()]
    batch.compute(CASES["on-policy clip too"])
    assert all(torch.equal(value, copy) for value, copy in zip(vars(batch).values(), copies, strict=True))


# ---- through verl's layout -------------------------------------------------------------------------------------------
def lay_out(batch: Batch, settings: SpearSettings, *, ranks: int) -> tuple[dict[str, Tensor], TensorDict]:
    """The mini-batch in verl's columns: log-probs stand one to the left of their tokens, as a model's do."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in batch.mask]
    rows = [
        RowTokens([1] * (2 + n % 3), [2] * length, batch.mask[n, :length].long().tolist(), [0.0] * length)
        for n, length in enumerate(lengths)
    ]
    output = []
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        before = torch.full((len(row.prompt_ids) - 1,), 99.0, dtype=torch.float64)
        output += [before, batch.log_probs[n, :length], torch.full((1,), 99.0, dtype=torch.float64)]
    data = build_columns(rows).exclude("rollout_log_probs")
    old = [batch.old_log_probs[n, :length] for n, length in enumerate(lengths)]
    data["old_log_probs"] = nest_flat(torch.cat(old), lengths)
    data[STEERING] = batch.steering(settings)
    columns = {ADVANTAGES: batch.own_advantages(settings), REFERENCE: batch.ref_log_probs}
    for name in list_token_columns(settings)[1:]:
        data[name] = nest_flat(torch.cat([columns[name][n, :length] for n, length in enumerate(lengths)]), lengths)
    tu.assign_non_tensor(data, cov_lower=BOUNDS[0], cov_upper=BOUNDS[1], dp_size=ranks)
    totals = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    flat = torch.cat(output).requires_grad_()
    return {"log_probs": nest_flat(flat, totals), "flat": flat}, data


@pytest.mark.parametrize("name", ["covariance clip off", "covariance clip of a tenth", "PPO with KL"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_verls_loss_function_reads_the_columns_as_the_paper_means_them(name: str, ranks: int) -> None:
    settings, batch = CASES[name], draw_batch(10)
    output, data = lay_out(batch, settings, ranks=ranks)
    loss, metrics = actor_loss(settings, output, data)
    expected, wanted = batch.specify(settings)
    # FSDP averages over ranks, so every rank's share is multiplied by their number.
    assert loss.item() == pytest.approx(ranks * expected.loss.item(), abs=1e-6)
    loss.backward()
    assert output["flat"].grad is not None
    assert float(output["flat"].grad.sum()) == pytest.approx(ranks * float(wanted.sum()), abs=1e-6)
    assert output["flat"].grad.norm() == pytest.approx(ranks * float(wanted.norm()), abs=1e-6)
    assert metrics["tokens"].aggregate() == float(batch.mask.sum())
    assert metrics["replay_tokens"].aggregate() == float(batch.mask[batch.replay].sum())
    # verl averages a sum over ranks too.
    assert metrics["on_policy"].aggregate() == pytest.approx(ranks * float(expected.on_policy), abs=1e-6)
