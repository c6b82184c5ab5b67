"""PPO with a critic: generalised advantage estimation and the clipped value loss (``sec:ppogrpo``)."""

from __future__ import annotations

import torch
from torch import Tensor


def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens the policy wrote (``sec:ppogrpo``).

    Tokens off the mask (prompts, observations) are stepped over: the token before one looks ahead to the next token of
    the policy, without a discount for the gap.

    Args:
        token_rewards, values: [B, T] float. Rewards off the mask are not seen: pay them on the policy's tokens.
        mask: [B, T], on where the policy wrote the token.
        whiten: shift and scale the advantages to mean 0 and (unbiased) variance 1 over all tokens on the mask.

    Returns:
        advantages and returns, each [B, T], 0 off the mask. Returns are taken before whitening.

    Raises:
        ValueError: shapes differ.
    """
    if not token_rewards.shape == values.shape == mask.shape or values.dim() != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (token_rewards, values, mask))
        raise ValueError(f"token_rewards, values and mask must have one shape [B, T], not {shapes}")
    on = mask > 0
    rewards, state_values = token_rewards.detach(), values.detach()
    advantages = torch.zeros_like(state_values)
    ahead = torch.zeros_like(state_values[:, 0]) if state_values.shape[1] else state_values.new_zeros(len(values))
    next_value = torch.zeros_like(ahead)
    for t in range(state_values.shape[1] - 1, -1, -1):
        here = on[:, t]
        delta = rewards[:, t] + gamma * next_value - state_values[:, t]
        ahead = torch.where(here, delta + gamma * lam * ahead, ahead)
        next_value = torch.where(here, state_values[:, t], next_value)
        advantages[:, t] = ahead
    advantages = torch.where(on, advantages, 0.0)
    returns = torch.where(on, advantages + state_values, 0.0)
    if whiten:
        advantages = _whiten(advantages, on)
    return advantages, returns


def _whiten(values: Tensor, on: Tensor) -> Tensor:
    count = on.sum().clamp(min=1)
    centred = torch.where(on, values - values.sum() / count, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> Tensor:
    """Clipped value loss of PPO: 0.5 max((v - R)^2, (clip(v) - R)^2), v clipped to ``old_values`` +- ``clip``.

    Args:
        values, old_values, returns: [B, T] float.
        mask: [B, T].
        clip: largest change of a value that still has a gradient; None: no clipping.

    Returns:
        [B, T], 0 off the mask.
    """
    loss = (values - returns).square()
    if clip is not None:
        clipped = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return torch.where(mask > 0, 0.5 * loss, 0.0)
