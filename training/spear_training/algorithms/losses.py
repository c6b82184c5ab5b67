"""Policy losses of tokens (choices of ``loss.policy``), and the KL term.

A policy loss is a function ``f(log_probs, old_log_probs, advantages, mask, *, clip_low, clip_high, dual_clip,
max_log_ratio, **options)``. All tensors are [B, T] (advantages also [B]), and a row is a sequence. The result is a
:class:`PolicyLoss`, or only its loss [B, T]. ``options`` are ``loss.policy_options``. The trainer sums over rows
and tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spear_training.algorithms.clipping import check_tokens, covariance, expand_advantages
from spear_training.algorithms.registry import POLICY_LOSSES
from spear_training.algorithms.schema import SettingsError
from spear_training.algorithms.settings import SpearSettings


@dataclass(frozen=True)
class PolicyLoss:
    """Token loss of a policy loss, each [B, T]; the flags are bool and off outside the mask."""

    loss: Tensor
    ratio: Tensor
    """pi / pi_old without a gradient, 1 off the mask."""
    clipped: Tensor
    """The ratio clip decided the loss."""
    dual_clipped: Tensor
    """Tokens whose loss is the dual clip's cap."""


def bind_policy_loss(settings: SpearSettings) -> Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]:
    """Return the policy loss of ``settings`` with its options, a function of (log_probs, old_log_probs, advantages,
    mask).
    """
    clip = settings.clip
    bound = partial(
        POLICY_LOSSES.call,
        settings.loss.policy,
        clip_low=clip.low,
        clip_high=clip.high,
        dual_clip=clip.dual,
        max_log_ratio=clip.max_log_ratio,
        **settings.loss.policy_options,
    )

    def compute(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
        answer = bound(log_probs, old_log_probs, advantages, mask)
        if isinstance(answer, PolicyLoss):
            return answer
        if not isinstance(answer, Tensor) or answer.shape != log_probs.shape:
            shape = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise SettingsError(
                f"loss.policy={settings.loss.policy} must give token losses of shape {list(log_probs.shape)}, "
                f"not {shape}"
            )
        # A user's loss is tokens alone. Ratios are measured here all the same, for the metrics and the covariance
        # clip, with nothing flagged as clipped.
        on = check_tokens(log_probs, mask)
        none = torch.zeros_like(on)
        log_ratio = _clamp(torch.where(on, log_probs - old_log_probs, 0.0).detach(), clip.max_log_ratio)
        return PolicyLoss(torch.where(on, answer, 0.0), torch.exp(log_ratio), none, none)

    return compute


def _clamp(log_ratio: Tensor, limit: float | None) -> Tensor:
    return log_ratio if limit is None else torch.clamp(log_ratio, -limit, limit)


@POLICY_LOSSES.register("vanilla")
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
    """Return the clipped policy loss of each token (``eq:grpo_vanilla``, ``eq:silvanilladetail``), with a dual clip.

    The loss is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log pi - log pi_old).

    Args:
        log_probs, old_log_probs: [B, T] float; gradients flow into the first only.
        advantages: [B] or [B, T].
        mask: [B, T], on for loss tokens.
        clip_low, clip_high: epsilon_lb and epsilon_ub.
        dual_clip: C; for negative A the loss is at most -C A (``tab:hyperparams_definition``). None: no cap.
        max_log_ratio: log ratios are clamped to this size, with gradient 0 beyond it. None: no clamp.
        keep: [B, T], off for removed tokens (M of ``eq:regularizationmask``); their loss is 0, their flags stay.

    Returns:
        loss (0 off mask and keep), ratio (1 off the mask) and flags.

    Raises:
        ValueError: shapes do not fit, or ``dual_clip`` is not above 1.
    """
    on = check_tokens(log_probs, mask)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}; None switches it off")
    weights = expand_advantages(advantages, log_probs).detach()
    # The logarithm is clamped before exp can overflow: infinity times an advantage of 0 would be NaN. Beyond the clamp
    # the gradient is 0, as it is beyond a clip.
    ratio = torch.exp(_clamp(torch.where(on, log_probs - old_log_probs.detach(), 0.0), max_log_ratio))
    plain = -weights * ratio
    limited = -weights * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    # The larger loss is the smaller objective. Strictly larger: within the range both are equal, and nothing is
    # clipped.
    clipped = on & (limited > plain)
    loss = torch.maximum(plain, limited)
    if dual_clip is None:
        dual_clipped = torch.zeros_like(on)
    else:
        # For A < 0 the term -r A grows with r without bound: nothing but C limits a token that became much likelier.
        cap = -dual_clip * weights
        dual_clipped = on & (weights < 0) & (loss > cap)
        loss = torch.where(dual_clipped, cap, loss)
    kept = on if keep is None else on & (keep > 0)
    return PolicyLoss(torch.where(kept, loss, 0.0), ratio.detach(), clipped, dual_clipped)


@POLICY_LOSSES.register("gspo")
def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    max_log_ratio: float | None = None,
) -> PolicyLoss:
    """GSPO: the clipped loss with the ratio of the sequence, s = exp(mean of log ratios), for each of its tokens.

    Its clip is much narrower than a token's: the authors have ``clip_low`` 3e-4 and ``clip_high`` 4e-4. Arguments and
    result as in :func:`policy_loss`, without a dual clip; log ratios are clamped at 10.
    """
    on = check_tokens(log_probs, mask)
    weights = expand_advantages(advantages, log_probs).detach()
    log_ratio = torch.where(on, log_probs - old_log_probs.detach(), 0.0)
    mean = (log_ratio.sum(1) / on.sum(1).clamp(min=1)).detach()
    # All tokens share one ratio, so a clip takes the whole sequence out: single unlikely tokens no longer decide.
    # The value is the sequence's, the gradient the token's own.
    own = torch.where(on, log_probs, 0.0)
    ratio = torch.exp(torch.clamp(own - own.detach() + mean[:, None], max=10.0))
    plain = -weights * ratio
    limited = -weights * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = torch.where(on, torch.maximum(plain, limited), 0.0)
    return PolicyLoss(loss, torch.where(on, ratio.detach(), 1.0), on & (limited > plain), torch.zeros_like(on))


@POLICY_LOSSES.register("cispo")
def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    max_log_ratio: float | None = 20.0,
) -> PolicyLoss:
    """CISPO: -sg(clip(r)) A log pi. The clip limits a token's weight without removing its gradient.

    Arguments and result as in :func:`policy_loss`, without the dual clip.
    """
    on = check_tokens(log_probs, mask)
    weights = expand_advantages(advantages, log_probs).detach()
    ratio = torch.exp(_clamp(torch.where(on, log_probs - old_log_probs, 0.0).detach(), max_log_ratio))
    # The weight is a constant; the gradient comes from log pi alone, so that a clipped token still learns.
    limited = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = torch.where(on, -limited * weights * torch.where(on, log_probs, 0.0), 0.0)
    return PolicyLoss(loss, ratio, on & (limited != ratio), torch.zeros_like(on))


@POLICY_LOSSES.register("kl_cov")
def kl_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    max_log_ratio: float | None = 20.0,
    share: float = 0.0002,
    coefficient: float = 1.0,
) -> PolicyLoss:
    """KL-Cov: a KL penalty instead of a clip, on the ``share`` of tokens of largest covariance, at least one.

    The loss is -r A, and -r A + ``coefficient`` |log r| on those tokens. Arguments and result are those of
    :func:`policy_loss`.
    """
    on = check_tokens(log_probs, mask)
    weights = expand_advantages(advantages, log_probs).detach()
    log_ratio = torch.where(on, log_probs - old_log_probs.detach(), 0.0)
    ratio = torch.exp(_clamp(log_ratio, max_log_ratio))
    loss = torch.where(on, -weights * ratio, 0.0)
    chosen = torch.zeros_like(on)
    tokens = int(on.sum())
    if tokens:
        # Off the mask the covariance is 0, which may be above that of tokens on it: they must come last.
        ranked = torch.where(on, covariance(log_probs, weights, mask), -torch.inf).flatten()
        chosen.view(-1)[torch.topk(ranked, max(1, int(tokens * share))).indices] = True
    loss = loss + torch.where(chosen, coefficient * log_ratio.abs(), 0.0)
    none = torch.zeros_like(on)
    return PolicyLoss(loss, ratio.detach(), none, none)


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the estimator k3 of the KL divergence to the reference: e^x - x - 1, x = log pi_ref - log pi (``eq:kl``);
    [B, T].
    """
    # Tokens are sampled from pi, and E_pi[pi_ref / pi] = 1: subtracting log and 1 leaves the mean at the divergence and
    # makes each sample non-negative, which log pi - log pi_ref is not.
    x = ref_log_probs.detach() - log_probs
    return torch.exp(x) - x - 1.0
