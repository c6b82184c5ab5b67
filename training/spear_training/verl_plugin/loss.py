"""The actor's loss: on-policy and replayed rows of one micro-batch, read from the columns the driver wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric

from spear_training.algorithms import Estimator, covariance_clip_mask, kl_divergence, policy_loss
from spear_training.algorithms.settings import SpearSettings
from spear_training.verl_plugin.batch import find_predictions, nest_flat

STEERING = "spear_row"
"""Column [N, 4]: advantage of the row, its weight in the loss, 1 if it is replayed, a seed of the random choice."""
ADVANTAGES = "advantages"
"""Column of response tokens, where they have advantages of their own (PPO); else the row's counts for all of them."""
REFERENCE = "ref_log_probs"
"""Column of response tokens: log-probs under the reference policy, where there is a KL term."""


WEIGHTS = "rollout_weights"
"""Column of response tokens: their factors where the rollout's log-probs are corrected for."""


def list_token_columns(settings: SpearSettings, *, corrected: bool = False) -> tuple[str, ...]:
    """Columns of response tokens that the loss reads besides those of a forward pass."""
    columns = ["old_log_probs"]
    if settings.advantage.estimator is Estimator.GAE:
        columns.append(ADVANTAGES)
    if settings.kl.coefficient > 0:
        columns.append(REFERENCE)
    if corrected:
        columns.append(WEIGHTS)
    return tuple(columns)


@dataclass(frozen=True)
class RowLoss:
    """Loss of a micro-batch with what is counted beside it; every field is a scalar tensor.

    ``total`` = ``on_policy`` + ``self_imitation``; the rest are numbers of tokens.
    """

    total: torch.Tensor
    on_policy: torch.Tensor
    self_imitation: torch.Tensor
    tokens: torch.Tensor
    replay_tokens: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor
    covariance_clipped: torch.Tensor
    kl: torch.Tensor
    """Sum over tokens of the KL divergence to the reference, before its coefficient; 0 without a reference."""


def compute_row_loss(
    settings: SpearSettings,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    steering: torch.Tensor,
    bounds: tuple[float, float],
    *,
    advantages: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    rollout_weights: torch.Tensor | None = None,
) -> RowLoss:
    """Clipped loss of on-policy rows (``eq:grpo_vanilla``) and covariance-clipped loss of replayed ones.

    The latter is ``eq:grpo_sal_reg``. Both have the KL term, where there is a reference (``eq:silvanilladetail``).

    Args:
        settings: ``spear`` node.
        log_probs, old_log_probs: [B, T].
        mask: [B, T], true on the policy's tokens.
        steering: :data:`STEERING` [B, 4]; gamma is already in the weights of replayed rows.
        bounds: covariance bounds (lower, upper) of replayed rows.
        advantages: [B, T] instead of those in ``steering``.
        ref_log_probs: [B, T], needed where ``kl.coefficient`` is above 0.
        rollout_weights: [B, T], factors of the clipped loss of each token; the KL term has none.
    """
    weight, replay = steering[:, 1:2], steering[:, 2] > 0
    if advantages is None:
        advantages = steering[:, :1].expand_as(log_probs)
    clip, cov = settings.clip, settings.cov
    options: dict[str, Any] = dict(
        clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual, max_log_ratio=clip.max_log_ratio
    )
    losses = policy_loss(log_probs, old_log_probs, advantages, mask, **options)
    clipped = (losses.clipped | losses.dual_clipped) & mask
    keep = torch.ones_like(mask)
    # One generator a micro-batch, seeded by the rows in it: no global stream is touched, no two batches share one.
    generator = torch.Generator().manual_seed(int(steering[:, 3].double().sum().item()) % 2**62)
    choice: dict[str, Any] = dict(
        exclude=clipped.cpu(),
        scope=cov.scope.value,
        budget=cov.budget.value,
        floor_one=cov.floor_one,
        generator=generator,
    )
    # The choice is made on the CPU, where the generator lives.
    inputs = log_probs.detach().cpu(), advantages.detach().cpu()
    replay_mask, fresh_mask = (mask & replay[:, None]).cpu(), (mask & ~replay[:, None]).cpu()
    if cov.ratio > 0 and bool(replay_mask.any()):
        lower, upper = bounds
        keep &= covariance_clip_mask(*inputs, replay_mask, ratio=cov.ratio, lower=lower, upper=upper, **choice).to(
            keep.device
        )
    if cov.on_policy and cov.on_policy_ratio > 0 and bool(fresh_mask.any()):
        lower, upper = cov.on_policy_lower, cov.on_policy_upper
        keep &= covariance_clip_mask(
            *inputs, fresh_mask, ratio=cov.on_policy_ratio, lower=lower, upper=upper, **choice
        ).to(keep.device)
    token_loss = torch.where(mask & keep, losses.loss, torch.zeros_like(losses.loss))
    if rollout_weights is not None:
        token_loss = token_loss * rollout_weights
    divergence = torch.zeros_like(losses.loss)
    if settings.kl.coefficient > 0:
        if ref_log_probs is None:
            raise ValueError("spear.kl.coefficient above 0 needs the reference policy's log-probs")
        # Blank off the mask: what stands there must not overflow, not even in the gradient.
        current, reference = (torch.where(mask, values, 0.0) for values in (log_probs, ref_log_probs))
        divergence = kl_divergence(current, reference)
        token_loss = token_loss + settings.kl.coefficient * divergence
    token_loss = token_loss * weight
    on_policy = token_loss[~replay].sum()
    self_imitation = token_loss[replay].sum()
    return RowLoss(
        total=on_policy + self_imitation,
        on_policy=on_policy.detach(),
        self_imitation=self_imitation.detach(),
        tokens=mask.sum(),
        replay_tokens=(mask & replay[:, None]).sum(),
        clipped=(losses.clipped & mask).sum(),
        dual_clipped=(losses.dual_clipped & mask).sum(),
        covariance_clipped=(mask & ~keep).sum(),
        kl=divergence.detach().sum(),
    )


def actor_loss(
    settings: SpearSettings,
    model_output: Mapping[str, torch.Tensor],
    data: TensorDict,
    dp_group: Any = None,
    *,
    corrected: bool = False,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """verl's loss function after ``functools.partial(actor_loss, settings)``; installed with ``set_loss_fn``.

    With ``corrected`` the rows have the column :data:`WEIGHTS`.

    FSDP averages gradients over ranks, so the loss is multiplied by their number: the row weights already speak of the
    whole mini-batch.
    """
    lengths = data["loss_mask"].offsets().diff()
    prompts = data["input_ids"].offsets().diff() - lengths
    where = find_predictions(prompts.cpu().numpy(), lengths.cpu().numpy()).to(lengths.device)
    log_probs = nest_flat(model_output["log_probs"].values()[where], lengths.tolist()).to_padded_tensor(0.0)
    names = list_token_columns(settings, corrected=corrected)
    columns = data.select("loss_mask", STEERING, *names).to_padded_tensor()
    result = compute_row_loss(
        settings,
        log_probs,
        columns["old_log_probs"],
        columns["loss_mask"] > 0,
        columns[STEERING],
        (float(data["cov_lower"]), float(data["cov_upper"])),
        advantages=columns[ADVANTAGES] if ADVANTAGES in names else None,
        ref_log_probs=columns[REFERENCE] if REFERENCE in names else None,
        rollout_weights=columns[WEIGHTS] if corrected else None,
    )
    counts = {
        "on_policy": result.on_policy,
        "self_imitation": result.self_imitation,
        "tokens": result.tokens,
        "replay_tokens": result.replay_tokens,
        "clipped": result.clipped,
        "dual_clipped": result.dual_clipped,
        "covariance_clipped": result.covariance_clipped,
        "kl": result.kl,
    }
    # verl averages such sums over ranks. Counts are only read as shares of each other; the loss is a sum over ranks.
    scale = {"on_policy": data["dp_size"], "self_imitation": data["dp_size"]}
    metrics = {name: Metric(AggregationType.SUM, float(value) * scale.get(name, 1)) for name, value in counts.items()}
    return result.total * data["dp_size"], metrics
