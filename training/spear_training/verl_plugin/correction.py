"""Weights and rejections of tokens on which rollout engine and trainer disagree, computed by verl."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from spear_envs.core.errors import SpearError
from spear_training.rollout_correction import RolloutCorrection
from spear_training.verl_plugin.columns import pad_rows


@dataclass(frozen=True)
class Corrected:
    """What a correction makes of a step's response tokens, concatenated over rows [S].

    Attributes:
        mask: loss tokens that are left; ``loss_tokens`` counts them for each row [N].
        weights: factor of each token in the policy's loss; 1 everywhere where there are rejections only.
        metrics: verl's own (``rollout_corr/*``).
    """

    mask: torch.Tensor
    weights: np.ndarray
    loss_tokens: tuple[int, ...]
    metrics: dict[str, float]


def correct_rows(
    correction: RolloutCorrection,
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    lengths: np.ndarray,
) -> Corrected:
    """Correct rows for the difference between ``log_probs`` (the trainer's) and ``rollout_log_probs``.

    Both are of response tokens, concatenated over rows [S], like ``mask`` of loss tokens, bool, at least one;
    ``lengths`` counts the response tokens of each row [N]. Raises SpearError if every weight is 0.
    """
    inside = pad_rows(torch.ones_like(mask, dtype=torch.int64), lengths) > 0
    try:
        weights, left, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=pad_rows(log_probs, lengths),
            rollout_log_prob=pad_rows(rollout_log_probs, lengths),
            response_mask=pad_rows(mask.float(), lengths),
            **asdict(correction),
        )
    except ZeroDivisionError as error:  # by the sum of weights that are all 0
        raise SpearError(
            f"no token of this step has a weight within {correction.rollout_is_threshold}: rollout engine and trainer "
            "are far apart; give both the same actor_rollout_ref.rollout.dtype, or widen "
            "algorithm.rollout_correction.rollout_is_threshold"
        ) from error
    kept = left > 0
    factors = torch.ones_like(log_probs) if weights is None else weights.batch["rollout_is_weights"][inside]
    return Corrected(kept[inside], factors.float().numpy(), tuple(kept.sum(-1).tolist()), metrics)
