"""Policy loss, KL term, aggregation, and the loss of SPEAR that joins them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spear_training.algorithms.choices import Aggregation
from spear_training.algorithms.covariance import covariance_clip_mask
from spear_training.algorithms.tokens import check_tokens, expand_advantages


@dataclass(frozen=True)
class PolicyLoss:
    """Token loss of :func:`policy_loss`, each [B, T]; the flags are bool and off outside the mask."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """The ratio clip decided the loss."""
    dual_clipped: Tensor
    """The dual clip decided the loss."""


@dataclass(frozen=True)
class SpearLoss:
    """Loss of ``eq:grpo_sal`` (negated objective); scalars. Only ``loss`` carries a gradient."""

    loss: Tensor
    on_policy: Tensor
    self_imitation: Tensor
    """Before its weight gamma."""
    clip_fraction: Tensor
    """Share of all loss tokens that the ratio clip decided."""
    cov_fraction: Tensor
    """Share of replayed loss tokens that the covariance clip took out."""
    dual_fraction: Tensor
    """Share of all loss tokens that the dual clip decided."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    max_log_ratio: float | None = 20.0,
    keep: Tensor | None = None,
) -> PolicyLoss:
    """Clipped policy loss of each token (``eq:grpo_vanilla``, ``eq:silvanilladetail``), with a dual clip.

    The loss is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log pi - log pi_old).

    Args:
        log_probs, old_log_probs: [B, T] float; gradients flow into the first only.
        advantages: [B] or [B, T].
        mask: [B, T], on for loss tokens.
        clip_low, clip_high: epsilon_lb and epsilon_ub.
        dual_clip: C; for negative A the loss is at most -C A (``tab:hyperparams_definition``). None: no cap.
        max_log_ratio: log ratios are clamped to this size, with gradient 0 beyond it. None: no clamp.
        keep: [B, T], off for tokens taken out (M of ``eq:regularizationmask``); their loss is 0, their flags stay.

    Returns:
        loss (0 off mask and keep), ratio (1 off the mask) and flags.

    Raises:
        ValueError: shapes do not fit, or ``dual_clip`` is not above 1.
    """
    on = check_tokens(log_probs, mask)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}; None switches it off")
    weights = expand_advantages(advantages, log_probs).detach()
    log_ratio = torch.where(on, log_probs - old_log_probs.detach(), 0.0)
    if max_log_ratio is not None:
        log_ratio = torch.clamp(log_ratio, -max_log_ratio, max_log_ratio)
    ratio = torch.exp(log_ratio)
    plain = -weights * ratio
    limited = -weights * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    clipped = on & (limited > plain)
    loss = torch.maximum(plain, limited)
    if dual_clip is None:
        dual_clipped = torch.zeros_like(on)
    else:
        cap = -dual_clip * weights
        dual_clipped = on & (weights < 0) & (loss > cap)
        loss = torch.where(dual_clipped, cap, loss)
    kept = on if keep is None else on & (keep > 0)
    return PolicyLoss(torch.where(kept, loss, 0.0), ratio.detach(), clipped, dual_clipped)


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimator k3 of the KL divergence to the reference: e^x - x - 1, x = log pi_ref - log pi (``eq:kl``); [B, T]."""
    x = ref_log_probs.detach() - log_probs
    return torch.exp(x) - x - 1.0


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: str = "seq-mean-token-sum-norm",
    loss_scale_factor: float | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """One number from token losses (``sec:botdetails``); see :class:`~spear_training.algorithms.choices.Aggregation`.

    With ``loss_scale_factor`` and ``num_sequences`` (or ``num_tokens``) of the whole mini-batch given, the sum over
    micro-batches is the value of the mini-batch, for every mode but ``sum-norm``, whose sum needs no count.

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
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), total * 0.0)


def spear_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    replay: Tensor,
    *,
    gamma: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    max_log_ratio: float | None = 20.0,
    cov_ratio: float = 0.02,
    cov_lower: float = 1.0,
    cov_upper: float = 40.0,
    cov_scope: str = "batch",
    cov_budget: str = "batch",
    cov_floor_one: bool = False,
    on_policy_cov: tuple[float, float, float] | None = None,
    mode: str = "seq-mean-token-sum-norm",
    loss_scale_factor: float | None = None,
    num_on_policy: float | Tensor | None = None,
    num_replay: float | Tensor | None = None,
    num_on_policy_tokens: float | Tensor | None = None,
    num_replay_tokens: float | Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    generator: torch.Generator | None = None,
) -> SpearLoss:
    """Loss of SPEAR, the negative of J = J_GRPO + gamma J_SIL (``eq:grpo_sal``, ``eq:grpo_sal_reg``).

    Args:
        log_probs, old_log_probs: [B, T] float; gradients flow into the first only.
        advantages: [B] or [B, T]; recalibrated ones on replayed rows.
        mask: [B, T], on for loss tokens.
        replay: [B], on for replayed rows.
        gamma: weight of the self-imitation term.
        clip_low, clip_high, dual_clip, max_log_ratio: as in :func:`policy_loss`.
        cov_ratio, cov_lower, cov_upper, cov_scope, cov_budget, cov_floor_one: as in :func:`covariance_clip_mask`, over
            the replayed rows; tokens that the ratio clip silenced are no candidates.
        on_policy_cov: (ratio, lower, upper) of a covariance clip over the on-policy rows; None: there is none.
        mode, loss_scale_factor: as in :func:`aggregate_loss`.
        num_on_policy, num_replay: sequences of each term in the whole mini-batch; None: non-empty rows of this batch.
            Each term is divided by its own count, so that gamma = 1 gives both equal weight.
        num_on_policy_tokens, num_replay_tokens: the same for the mode ``token-mean``.
        ref_log_probs: [B, T], needed where ``kl_coefficient`` (beta of ``eq:grpo_vanilla``) is above 0.
        generator: of the covariance clip.

    Raises:
        ValueError: shapes or options do not fit.
    """
    on = check_tokens(log_probs, mask)
    if replay.shape != log_probs.shape[:1]:
        raise ValueError(f"replay must be [B] for {tuple(log_probs.shape)}, not {tuple(replay.shape)}")
    is_replay = (replay > 0)[:, None]
    ratio_clip: dict[str, Any] = {
        "clip_low": clip_low,
        "clip_high": clip_high,
        "dual_clip": dual_clip,
        "max_log_ratio": max_log_ratio,
    }
    tokens = policy_loss(log_probs, old_log_probs, advantages, mask, **ratio_clip)
    replayed, fresh = on & is_replay, on & ~is_replay
    clip: dict[str, Any] = {
        "exclude": tokens.clipped | tokens.dual_clipped,
        "scope": cov_scope,
        "budget": cov_budget,
        "floor_one": cov_floor_one,
        "generator": generator,
    }
    stays = covariance_clip_mask(
        log_probs, advantages, replayed, ratio=cov_ratio, lower=cov_lower, upper=cov_upper, **clip
    )
    removed = replayed & ~stays
    if on_policy_cov is not None:
        ratio, lower, upper = on_policy_cov
        stays = stays & covariance_clip_mask(
            log_probs, advantages, fresh, ratio=ratio, lower=lower, upper=upper, **clip
        )
    loss = torch.where(stays, tokens.loss, 0.0)
    if kl_coefficient > 0.0:
        if ref_log_probs is None:
            raise ValueError("a kl_coefficient above 0 needs ref_log_probs")
        # Blank off the mask: what stands there must not overflow, not even in the gradient.
        current, reference = (torch.where(on, values, 0.0) for values in (log_probs, ref_log_probs))
        loss = loss + kl_coefficient * kl_divergence(current, reference)

    shape: dict[str, Any] = {"mode": mode, "loss_scale_factor": loss_scale_factor}
    on_policy = aggregate_loss(loss, fresh, num_sequences=num_on_policy, num_tokens=num_on_policy_tokens, **shape)
    imitation = aggregate_loss(loss, replayed, num_sequences=num_replay, num_tokens=num_replay_tokens, **shape)
    count = on.sum().clamp(min=1)
    return SpearLoss(
        loss=on_policy + gamma * imitation,
        on_policy=on_policy.detach(),
        self_imitation=imitation.detach(),
        clip_fraction=tokens.clipped.sum() / count,
        cov_fraction=removed.sum() / replayed.sum().clamp(min=1),
        dual_fraction=tokens.dual_clipped.sum() / count,
    )
