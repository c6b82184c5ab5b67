"""The actor's loss on verl's workers: :func:`spear_loss` over the columns the driver wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric

from spear_training.algorithms import SpearSettings
from spear_training.step.loss import compute_loss, measure_loss
from spear_training.verl_plugin.columns import find_predictions, nest_flat

STEERING = "spear_row"
"""Column [N, 4], see :func:`spear_training.step.loss.compute_loss`."""
TOKEN_COLUMNS = {
    "log_probs": "old_log_probs",
    "token_advantages": "advantages",
    "ref_log_probs": "ref_log_probs",
    "rollout_weights": "rollout_weights",
}
"""Columns of response tokens that an update writes, as far as its rows have them: names of the table and the queue."""


def actor_loss(
    settings: SpearSettings, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """verl's loss function after ``functools.partial(actor_loss, settings)``; installed with ``set_loss_fn``.

    FSDP averages gradients over ranks, so the loss is multiplied by their number: the row weights already speak of the
    full mini-batch.
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
        columns[STEERING],
        {name: columns[name] for name in ("loss_mask", *present)},
        gamma=float(data["gamma"]),
        bounds=None if bounds[0] != bounds[0] else bounds,
    )
    sums = measure_loss(result)
    # verl averages such sums over ranks. Counts are only read as shares of each other; the loss is a sum over ranks.
    scale = {"on_policy": data["dp_size"], "self_imitation": data["dp_size"]}
    metrics = {name: Metric(AggregationType.SUM, value * scale.get(name, 1)) for name, value in sums.items()}
    return result.loss * data["dp_size"], metrics
