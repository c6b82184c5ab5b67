"""The actor's loss on verl's workers: :func:`spear_loss` over the columns the driver wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric

from spear_training.algorithms import CovarianceClip, SpearLoss, SpearSettings, bind_policy_loss, spear_loss
from spear_training.verl_plugin.columns import find_predictions, nest_flat

STEERING = "spear_row"
"""Column [N, 4]: advantage of the row, its weight in the loss, 1 if it is replayed, a seed of the random choice."""
TOKEN_COLUMNS = {
    "log_probs": "old_log_probs",
    "token_advantages": "advantages",
    "ref_log_probs": "ref_log_probs",
    "rollout_weights": "rollout_weights",
}
"""Columns of response tokens that an update writes, as far as its rows have them: names of the table and the queue."""


def compute_loss(
    settings: SpearSettings,
    log_probs: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    *,
    gamma: float,
    bounds: tuple[float, float] | None,
) -> SpearLoss:
    """Loss of rows of one micro-batch.

    Args:
        settings: of the algorithm.
        log_probs: [B, T].
        columns: ``loss_mask`` [B, T], :data:`STEERING` [B, 4] and :data:`TOKEN_COLUMNS` [B, T] in the queue's names.
        gamma: weight of replayed rows.
        bounds: of their covariance clip; None: those of this micro-batch.
    """
    steering, cov = columns[STEERING], settings.cov
    shared: dict[str, Any] = dict(scope=cov.scope.value, budget=cov.budget.value, floor_one=cov.floor_one)
    lower, upper = bounds or (None, None)
    measured: dict[str, Any] = dict(bounds=cov.bounds, lower_top=cov.lower_top, upper_top=cov.upper_top)
    on_policy = CovarianceClip(cov.on_policy_ratio, cov.on_policy_lower, cov.on_policy_upper, **shared)
    return spear_loss(
        log_probs,
        columns["old_log_probs"],
        columns.get("advantages", steering[:, 0]),
        columns["loss_mask"] > 0,
        steering[:, 2] > 0,
        gamma=gamma,
        policy=bind_policy_loss(settings),
        cov=CovarianceClip(cov.ratio, lower, upper, **shared, **measured),
        on_policy_cov=on_policy if cov.on_policy else None,
        weights=steering[:, 1],
        ref_log_probs=columns.get("ref_log_probs"),
        kl_coefficient=settings.kl.coefficient,
        rollout_weights=columns.get("rollout_weights"),
        # One generator a micro-batch, seeded by the rows in it: no global stream is touched, no two batches share one.
        generator=torch.Generator().manual_seed(int(steering[:, 3].double().sum().item()) % 2**62),
    )


def actor_loss(
    settings: SpearSettings, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """verl's loss function after ``functools.partial(actor_loss, settings)``; installed with ``set_loss_fn``.

    FSDP averages gradients over ranks, so the loss is multiplied by their number: the row weights already speak of the
    whole mini-batch.
    """
    lengths = data["loss_mask"].offsets().diff()
    prompts = data["input_ids"].offsets().diff() - lengths
    where = find_predictions(prompts.cpu().numpy(), lengths.cpu().numpy()).to(lengths.device)
    log_probs = nest_flat(model_output["log_probs"].values()[where], lengths.tolist()).to_padded_tensor(0.0)
    present = [name for name in TOKEN_COLUMNS.values() if name in data.keys()]  # noqa: SIM118 - iterates over rows
    columns = data.select("loss_mask", STEERING, *present).to_padded_tensor()
    bounds = (float(data["cov_lower"]), float(data["cov_upper"]))
    result = compute_loss(
        settings,
        log_probs,
        {name: columns[name] for name in ("loss_mask", STEERING, *present)},
        gamma=float(data["gamma"]),
        bounds=None if bounds[0] != bounds[0] else bounds,
    )
    sums = measure_loss(result)
    # verl averages such sums over ranks. Counts are only read as shares of each other; the loss is a sum over ranks.
    scale = {"on_policy": data["dp_size"], "self_imitation": data["dp_size"]}
    metrics = {name: Metric(AggregationType.SUM, value * scale.get(name, 1)) for name, value in sums.items()}
    return result.loss * data["dp_size"], metrics


def measure_loss(result: SpearLoss) -> dict[str, float]:
    """What a loss counted, as numbers that add up; covariance bounds are weighted by their tokens."""
    names = ("on_policy", "self_imitation", "tokens", "replay_tokens", "clipped", "dual_clipped", "covariance_clipped")
    sums = {
        name: float(getattr(result, name)) for name in (*names, "kl", "kl_old", "replay_ratio", "replay_ratio_squared")
    }
    lower, upper = result.bounds
    return sums | {"cov_lower": lower * sums["replay_tokens"], "cov_upper": upper * sums["replay_tokens"]}
