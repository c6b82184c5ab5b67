"""Policy entropy (``sec:policyentropydef``)."""

from __future__ import annotations

import torch
from torch import Tensor

from spear_training.algorithms.objective import aggregate_loss


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the distribution of each token: logits [B, T, V] float -> [B, T].

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
    """Mean over sequences of the sum of token entropies, divided by L (``eq:entropysum``, ``fig:entropy``); scalar.

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
