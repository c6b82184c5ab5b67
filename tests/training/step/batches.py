"""Mini-batches of random numbers, with the loss that settings give them and the one that the paper does."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spear_training.algorithms import (
    BoundsMode,
    CovarianceClip,
    SpearLoss,
    SpearSettings,
    policy_loss,
    spear_loss,
    weigh_rows,
)
from spear_training.step.update import compute_loss

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
        if not settings.advantage.needs_critic:
            return self.advantages
        return torch.where(self.replay[:, None], self.advantages[:, None], self.token_advantages)

    def steering(self, settings: SpearSettings) -> Tensor:
        """The column that the driver writes."""
        weights = weigh_rows(
            self.mask.sum(1).numpy(),
            self.replay.numpy(),
            mode=settings.loss.aggregation.value,
            loss_scale_factor=float(LENGTH),
        )
        return torch.stack([self.advantages, torch.from_numpy(weights), self.replay.double(), self.seeds], 1)

    def columns(self, settings: SpearSettings) -> dict[str, Tensor]:
        """Columns of tokens, those that the settings ask for."""
        columns = {"loss_mask": self.mask.long(), "old_log_probs": self.old_log_probs}
        if settings.advantage.needs_critic:
            columns["advantages"] = self.own_advantages(settings)
        if settings.kl.coefficient > 0:
            columns["ref_log_probs"] = self.ref_log_probs
        return columns

    def compute(self, settings: SpearSettings, rows: slice = slice(None)) -> tuple[SpearLoss, Tensor]:
        """The step's loss of ``rows`` and its gradient with respect to their log-probs."""
        log_probs = self.log_probs[rows].clone().requires_grad_()
        result = compute_loss(
            settings,
            log_probs,
            self.steering(settings)[rows],
            {name: values[rows] for name, values in self.columns(settings).items()},
            gamma=GAMMA,
            bounds=find_bounds(settings),
        )
        result.loss.backward()
        assert log_probs.grad is not None
        return result, log_probs.grad

    def specify(self, settings: SpearSettings) -> tuple[SpearLoss, Tensor]:
        """The paper's loss of the same mini-batch and its gradient."""
        log_probs = self.log_probs.clone().requires_grad_()
        clip, cov, bounds = settings.clip, settings.cov, find_bounds(settings) or (None, None)
        shared: dict[str, Any] = dict(scope=cov.scope.value, budget=cov.budget.value, floor_one=cov.floor_one)
        measured: dict[str, Any] = dict(bounds=cov.bounds, lower_top=cov.lower_top, upper_top=cov.upper_top)
        own = CovarianceClip(cov.on_policy_ratio, cov.on_policy_lower, cov.on_policy_upper, **shared)
        result = spear_loss(
            log_probs,
            self.old_log_probs,
            self.own_advantages(settings),
            self.mask,
            self.replay,
            gamma=GAMMA,
            policy=partial(
                policy_loss,
                clip_low=clip.low,
                clip_high=clip.high,
                dual_clip=clip.dual,
                max_log_ratio=clip.max_log_ratio,
            ),
            cov=CovarianceClip(cov.ratio, *bounds, **shared, **measured),
            on_policy_cov=own if cov.on_policy else None,
            mode=settings.loss.aggregation.value,
            loss_scale_factor=float(LENGTH),
            ref_log_probs=self.ref_log_probs,
            kl_coefficient=settings.kl.coefficient,
            generator=torch.Generator().manual_seed(int(self.seeds.sum())),
        )
        result.loss.backward()
        assert log_probs.grad is not None
        return result, log_probs.grad


def find_bounds(settings: SpearSettings) -> tuple[float, float] | None:
    """What the step gives: nothing where bounds are still to be measured."""
    return BOUNDS if settings.cov.bounds is BoundsMode.FIXED else None


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


def fix(**options: Any) -> dict[str, Any]:
    """Settings of a covariance clip with given bounds."""
    return {"bounds": "fixed", "lower": BOUNDS[0], "upper": BOUNDS[1], **options}


NO_COV = {"ratio": 0.0}
ON_POLICY = {"on_policy": True, "on_policy_ratio": 0.2, "on_policy_lower": -1.0, "on_policy_upper": 1.0}
CASES = {
    "covariance clip off": choose(cov=NO_COV),
    "covariance clip of a tenth": choose(cov=fix(ratio=0.1)),
    "running bounds": choose(cov={"ratio": 0.1, "lower_top": 0.5, "upper_top": 0.1}),
    "percentile bounds": choose(cov={"ratio": 0.1, "bounds": "percentile", "lower_top": 1.0, "upper_top": 0.2}),
    "by trajectory": choose(cov=fix(ratio=0.3, budget="trajectory", floor_one=True)),
    "by position": choose(cov=fix(ratio=0.3, scope="position")),
    "on-policy clip too": choose(cov=fix(ratio=0.1, **ON_POLICY)),
    "on-policy clip alone": choose(cov=fix(ratio=0.0, **ON_POLICY)),
    "no dual clip, no clamp": choose(
        cov=NO_COV,
        clip={"dual": None, "max_log_ratio": None},
        loss={"aggregation": "token-mean"},
        kl={"coefficient": 0.1},
    ),
    "narrow clips": choose(cov=NO_COV, clip={"low": 0.02, "high": 0.03, "dual": 1.1, "max_log_ratio": 0.5}),
    "KL to a reference": choose(cov=fix(ratio=0.1), kl={"coefficient": 0.2}),
    "advantages of tokens": choose(cov=fix(ratio=0.1), advantage={"estimator": "gae"}),
    "PPO with KL": choose(
        cov=NO_COV, kl={"coefficient": 0.05}, advantage={"estimator": "gae"}, loss={"aggregation": "token-mean"}
    ),
    "token-mean": choose(cov=NO_COV, loss={"aggregation": "token-mean"}),
    "seq-mean-token-mean": choose(cov=NO_COV, loss={"aggregation": "seq-mean-token-mean"}),
    "seq-mean-token-sum": choose(cov=NO_COV, loss={"aggregation": "seq-mean-token-sum"}),
    "sum-norm": choose(cov=NO_COV, loss={"aggregation": "sum-norm"}),
}
