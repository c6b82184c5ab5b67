"""The loss of SPEAR, the aggregation of token losses, and the policy's entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spear_training.algorithms.choices import Aggregation, BoundsMode
from spear_training.algorithms.clipping import (
    calibrate_covariance_bounds,
    check_tokens,
    covariance_clip_mask,
    find_covariance_quantiles,
)
from spear_training.algorithms.losses import PolicyLoss, kl_divergence, policy_loss
from spear_training.algorithms.rows import Array

TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: str = "seq-mean-token-sum-norm",
    loss_scale_factor: float | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Aggregate token losses (``sec:botdetails``); see :class:`~spear_training.algorithms.choices.Aggregation`.

    With ``loss_scale_factor`` and ``num_sequences`` (or ``num_tokens``) of the full mini-batch, the sum over
    micro-batches is the value of the mini-batch, for every mode except ``sum-norm``, which needs no count.

    Args:
        loss: [B, T] float; mask: [B, T], on for loss tokens.
        mode: one of the values of ``Aggregation``.
        loss_scale_factor: L of the -norm modes; None: T.
        num_sequences: sequences to divide by; None: rows with a loss token.
        num_tokens: tokens to divide by in ``token-mean``; None: loss tokens.

    Returns:
        scalar; 0 (with a gradient of 0) where everything is masked or the count is 0.

    Raises:
        ValueError: shapes, mode or counts do not fit.
    """
    on = check_tokens(loss, mask, "loss")
    kind = Aggregation(mode)
    total = torch.where(on, loss, 0.0)
    length = float(loss_scale_factor) if loss_scale_factor is not None else float(max(1, loss.shape[1]))
    if length <= 0:
        raise ValueError(f"loss_scale_factor must be above 0, not {length}")
    if kind is Aggregation.SUM_NORM:
        return total.sum() / length
    if kind is Aggregation.TOKEN_MEAN:
        return _divide(total.sum(), on.sum() if num_tokens is None else num_tokens, "num_tokens")
    sequences = on.any(1).sum() if num_sequences is None else num_sequences
    if kind is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return _divide((total.sum(1) / on.sum(1).clamp(min=1)).sum(), sequences, "num_sequences")
    value = _divide(total.sum(), sequences, "num_sequences")
    return value / length if kind is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else value


def _divide(total: Tensor, count: float | Tensor, name: str) -> Tensor:
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    if count.device.type == "cpu" and count < 0:
        raise ValueError(f"{name} must be 0 or more, not {float(count)}")
    # where() differentiates both branches, and a quotient by 0 would put NaN into the gradient even where it is not
    # chosen. total * 0 keeps the graph, so that a batch without a loss token still has a backward pass.
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), total * 0.0)


def weigh_rows(loss_tokens: Array, replayed: Array, *, mode: str, loss_scale_factor: float) -> Array:
    """Return the weight of each row [N] of one mini-batch, such that its loss is the sum of weight times summed token
    losses.

    On-policy and replayed rows are each divided by their own number, so that both terms of the objective
    (``eq:grpo_sal``) keep their scale for any number of drawn rows. A row without a loss token weighs 0.

    Args:
        loss_tokens: of each row [N].
        replayed: flags [N].
        mode: as in :func:`aggregate_loss`.
        loss_scale_factor: L of the -norm modes.
    """
    kind = Aggregation(mode)
    tokens, weights = np.asarray(loss_tokens, dtype=np.float64), np.zeros(len(loss_tokens))
    for term in (False, True):
        rows = (np.asarray(replayed, dtype=bool) == term) & (tokens > 0)
        if kind is Aggregation.SUM_NORM:
            weights[rows] = 1.0 / loss_scale_factor
        elif kind is Aggregation.TOKEN_MEAN:
            weights[rows] = 1.0 / max(1.0, tokens[rows].sum())
        elif kind is Aggregation.SEQ_MEAN_TOKEN_MEAN:
            # Each row's own mean, then the mean over rows: a token of a long row weighs less.
            weights[rows] = 1.0 / (rows.sum() * tokens[rows])
        else:
            weights[rows] = 1.0 / max(1, rows.sum())
            if kind is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
                weights[rows] /= loss_scale_factor
    return weights


@dataclass(frozen=True)
class CovarianceClip:
    """Options of :func:`~spear_training.algorithms.clipping.covariance_clip_mask` for one of the two terms.

    Without ``lower`` and ``upper`` the bounds are those of the batch, measured according to ``bounds``.
    """

    ratio: float = 0.02
    lower: float | None = 1.0
    upper: float | None = 40.0
    scope: str = "batch"
    budget: str = "batch"
    floor_one: bool = False
    bounds: BoundsMode = BoundsMode.FIXED
    lower_top: float = 0.2
    upper_top: float = 0.0002

    def measure(self, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[float, float]:
        """Return the bounds of a batch, [B, T] each; the given ones if they are fixed or the mask is empty."""
        if self.bounds is BoundsMode.FIXED or self.ratio == 0 or not bool((mask > 0).any()):
            return float(self.lower or 0.0), float(self.upper or 0.0)
        find = calibrate_covariance_bounds if self.bounds is BoundsMode.PERCENTILE else find_covariance_quantiles
        tops = {"lower_top": self.lower_top, "upper_top": self.upper_top}
        return find(log_probs, advantages, mask, scope=self.scope, **tops)

    def draw(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        exclude: Tensor,
        measured: tuple[float, float],
        generator: torch.Generator | None,
    ) -> Tensor:
        """Return the tokens that stay, bool [B, T].

        ``measured`` replaces missing bounds and widens running ones, so that lambda finds its share among the largest
        covariances of the batch even if the policy has moved since.
        """
        lower, upper = measured if self.lower is None or self.upper is None else (self.lower, self.upper)
        if self.bounds is BoundsMode.RUNNING:
            lower, upper = min(lower, measured[0]), max(upper, measured[1])
        return covariance_clip_mask(
            log_probs,
            advantages,
            mask,
            ratio=self.ratio,
            lower=lower,
            upper=upper,
            exclude=exclude,
            scope=self.scope,
            budget=self.budget,
            floor_one=self.floor_one,
            generator=generator,
        )


@dataclass(frozen=True)
class SpearLoss:
    """Loss of ``eq:grpo_sal`` (negated objective) and its counts; only ``loss`` has a gradient.

    All except ``bounds`` are scalars. ``self_imitation`` is before its weight gamma. The others are sums over tokens,
    which add up over micro-batches and ranks.
    """

    loss: Tensor
    on_policy: Tensor
    self_imitation: Tensor
    tokens: Tensor
    replay_tokens: Tensor
    clipped: Tensor
    """Tokens decided by the ratio clip."""
    dual_clipped: Tensor
    """Tokens decided by the dual clip."""
    covariance_clipped: Tensor
    """Replayed tokens removed by the covariance clip."""
    kl: Tensor
    """KL divergence to the reference policy, before its coefficient; 0 without one."""
    kl_old: Tensor
    """KL divergence of fresh tokens from the policy that played, r - 1 - log r."""
    replay_ratio: Tensor
    """Ratios of replayed tokens, and their squares: the effective sample size is the first squared over the second."""
    replay_ratio_squared: Tensor
    bounds: tuple[float, float]
    """Covariance bounds measured on the replayed tokens of this batch."""

    @property
    def clip_fraction(self) -> Tensor:
        """Share of all loss tokens decided by the ratio clip."""
        return self.clipped / self.tokens.clamp(min=1)

    @property
    def dual_fraction(self) -> Tensor:
        """Share of all loss tokens decided by the dual clip."""
        return self.dual_clipped / self.tokens.clamp(min=1)

    @property
    def cov_fraction(self) -> Tensor:
        """Share of replayed loss tokens removed by the covariance clip."""
        return self.covariance_clipped / self.replay_tokens.clamp(min=1)


def spear_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    replay: Tensor,
    *,
    gamma: float,
    policy: TokenLoss = policy_loss,
    cov_ratio: float = 0.02,
    cov: CovarianceClip | None = None,
    on_policy_cov: CovarianceClip | None = None,
    mode: str = "seq-mean-token-sum-norm",
    loss_scale_factor: float | None = None,
    weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coefficient: float = 0.0,
    rollout_weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> SpearLoss:
    """Return the loss of SPEAR, the negative of J = J_GRPO + gamma J_SIL (``eq:grpo_sal``, ``eq:grpo_sal_reg``).

    Args:
        log_probs, old_log_probs: [B, T] float; gradients flow into the first only.
        advantages: [B] or [B, T]; recalibrated ones on replayed rows.
        mask: [B, T], on for loss tokens; replay: [B], on for replayed rows.
        gamma: weight of the self-imitation term.
        policy: token losses of both terms (:func:`~spear_training.algorithms.losses.bind_policy_loss`).
        cov_ratio: lambda of the replayed rows' covariance clip, its other options at their defaults; or
        cov: that clip with all its options. Tokens silenced by the ratio clip are not candidates.
        on_policy_cov: a covariance clip of the on-policy rows.
        mode, loss_scale_factor: as in :func:`aggregate_loss`, of this batch as one mini-batch (:func:`weigh_rows`); or
        weights: [B], of the rows in the mini-batch that contains this batch.
        ref_log_probs: [B, T], needed if ``kl_coefficient`` (beta of ``eq:grpo_vanilla``) is above 0.
        entropy: [B, T], of the policy at each token, with a gradient; needed if ``entropy_coefficient`` is above 0. The
            bonus is aggregated like the policy loss, and covers replayed rows and tokens that a clip removed, too.
        rollout_weights: [B, T], factors of the policy loss of each token, without the KL term and the entropy.
        generator: of the covariance clips.

    Raises:
        ValueError: shapes or options do not fit.
    """
    on = check_tokens(log_probs, mask)
    if replay.shape != log_probs.shape[:1]:
        raise ValueError(f"replay must be [B] for {tuple(log_probs.shape)}, not {tuple(replay.shape)}")
    is_replay = replay > 0
    replayed, fresh = on & is_replay[:, None], on & ~is_replay[:, None]
    tokens = policy(log_probs, old_log_probs, advantages, mask)
    # The two terms are clipped apart: covariances of replayed tokens are relative to the means of replayed tokens.
    clips = ((cov or CovarianceClip(cov_ratio), replayed), (on_policy_cov, fresh))
    removed, bounds = _clip_covariances(log_probs, advantages, tokens, clips, generator)
    # Removed tokens stay in the denominators (eq:grpo_sal_reg multiplies by M inside the mean).
    loss = torch.where(on & ~removed, tokens.loss, 0.0)
    # Importance weights of the rollout are of the sampled tokens' policy gradient; KL and entropy have no such bias.
    loss = loss if rollout_weights is None else loss * rollout_weights
    divergence = torch.zeros_like(loss)
    if kl_coefficient > 0.0:
        if ref_log_probs is None:
            raise ValueError("a kl_coefficient above 0 needs ref_log_probs")
        # Zero off the mask: values there must not overflow, not even in the gradient.
        divergence = kl_divergence(*(torch.where(on, values, 0.0) for values in (log_probs, ref_log_probs)))
        loss = loss + kl_coefficient * divergence
    if entropy_coefficient > 0.0:
        if entropy is None:
            raise ValueError("an entropy_coefficient above 0 needs entropy")
        loss = loss - entropy_coefficient * torch.where(on, entropy, 0.0)
    if weights is None:
        scale = float(loss_scale_factor) if loss_scale_factor is not None else float(max(1, loss.shape[1]))
        # Without weights from the driver this batch is the mini-batch, as in tests and in a user's own loop.
        made = weigh_rows(on.sum(1).cpu().numpy(), is_replay.cpu().numpy(), mode=mode, loss_scale_factor=scale)
        weights = torch.from_numpy(made).to(loss)
    summed = loss.sum(1) * weights
    on_policy, imitation = summed[~is_replay].sum(), summed[is_replay].sum()
    # k3 from the old to the present policy, of fresh tokens only: replayed ones were written by older policies.
    # Its value is k3 again, e^x - 1 - x, by expm1: for the tiny log ratios of a first epoch e^x - 1 would be all
    # rounding.
    log_ratio = torch.where(fresh, log_probs - old_log_probs, 0.0).detach()
    ratio = torch.where(replayed, tokens.ratio, 0.0)
    return SpearLoss(
        loss=on_policy + gamma * imitation,
        on_policy=on_policy.detach(),
        self_imitation=imitation.detach(),
        tokens=on.sum(),
        replay_tokens=replayed.sum(),
        clipped=(tokens.clipped & on).sum(),
        dual_clipped=(tokens.dual_clipped & on).sum(),
        covariance_clipped=(removed & replayed).sum(),
        kl=divergence.detach().sum(),
        kl_old=(torch.expm1(log_ratio.clamp(max=20.0)) - log_ratio).sum(),
        replay_ratio=ratio.sum(),
        replay_ratio_squared=ratio.square().sum(),
        bounds=bounds,
    )


def _clip_covariances(
    log_probs: Tensor,
    advantages: Tensor,
    tokens: PolicyLoss,
    clips: tuple[tuple[CovarianceClip | None, Tensor], ...],
    generator: torch.Generator | None,
) -> tuple[Tensor, tuple[float, float]]:
    """Return the tokens removed by the covariance clips, bool [B, T], and the bounds measured by the first of them.

    The choice is made on the CPU, the device of the generator.
    """
    removed = torch.zeros_like(tokens.clipped)
    values, weights = log_probs.detach().cpu(), advantages.detach().cpu()
    silent = (tokens.clipped | tokens.dual_clipped).cpu()
    found = (0.0, 0.0)
    for number, (clip, mask) in enumerate(clips):
        if clip is None or clip.ratio == 0 or not bool(mask.any()):
            continue
        on = mask.cpu()
        measured = clip.measure(values, weights, on)
        # With running bounds, CovarianceClip.draw takes the wider of the running and the measured ones.
        stays = clip.draw(values, weights, on, silent, measured, generator)
        removed |= mask & ~stays.to(mask.device)
        if number == 0:
            found = measured
    return removed, found


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of the distribution of each token: logits [B, T, V] float -> [B, T].

    A logit of minus infinity is a token of probability 0. Half-precision logits are summed in float32.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    log_probs = torch.log_softmax(wide, dim=-1)
    # 0 * log 0 = 0; replaced before the product, so that the gradient stays finite too.
    safe = log_probs.masked_fill(torch.isneginf(log_probs), 0.0)
    return -(torch.exp(log_probs) * safe).sum(-1).to(logits.dtype)


def sequence_entropy(
    token_entropy: Tensor,
    mask: Tensor,
    *,
    loss_scale_factor: float | None = None,
    num_sequences: float | Tensor | None = None,
) -> Tensor:
    """Return the mean over sequences of the sum of token entropies, divided by L (``eq:entropysum``, ``fig:entropy``);
    scalar.

    Args:
        token_entropy: [B, T]; mask: [B, T].
        loss_scale_factor: L; 1 gives ``eq:entropysum`` itself, None divides by T.
        num_sequences: sequences to divide by; None: non-empty rows.
    """
    return aggregate_loss(
        token_entropy,
        mask,
        mode="seq-mean-token-sum-norm",
        loss_scale_factor=loss_scale_factor,
        num_sequences=num_sequences,
    )
