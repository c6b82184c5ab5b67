"""PPO with a critic: generalised advantage estimation and the clipped value loss (``sec:ppogrpo``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spear_training.algorithms.rows import Array


def gae_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates over the tokens of the policy (``sec:ppogrpo``).

    Tokens off the mask (prompts, observations) are skipped: the token before them looks ahead to the next token of the
    policy, without a discount for the gap.

    Args:
        token_rewards, values: [B, T] float. Rewards off the mask are ignored: put them on the policy's tokens.
        mask: [B, T], on for the policy's tokens.
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
    # Backwards in time. Off the mask both carries stay as they are, so that an observation is stepped over: the token
    # before it is followed by the policy's next token, as if the observation were part of the environment's answer.
    for t in range(state_values.shape[1] - 1, -1, -1):
        here = on[:, t]
        delta = rewards[:, t] + gamma * next_value - state_values[:, t]
        ahead = torch.where(here, delta + gamma * lam * ahead, ahead)
        next_value = torch.where(here, state_values[:, t], next_value)
        advantages[:, t] = ahead
    advantages = torch.where(on, advantages, 0.0)
    # Before whitening: the critic learns returns on the scale of the rewards.
    returns = torch.where(on, advantages + state_values, 0.0)
    if whiten:
        advantages = whiten_advantages(advantages, on)
    return advantages, returns


def episode_advantages(
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int] | Array,
    episodes: Sequence[int] | Array,
    rewards: Sequence[float] | Array,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return :func:`gae_advantages` over episodes whose tokens are in several rows (one for each turn).

    The rows of an episode, in order, are one sequence: the last token of the policy in a turn looks ahead to the first
    of the next turn, as if the prompt between them were an observation, so the layout of the rows has no effect. The
    reward is on the last token of the policy, which is terminal also at the turn limit (part of the task).

    Args:
        values: [S] float, concatenated over N rows.
        mask: [S], on for the policy's tokens.
        lengths: N row lengths with sum S.
        episodes: N episode numbers from 0; the rows of an episode are in order of time.
        rewards: the reward of each episode.

    Returns:
        advantages (not whitened) and returns, each [S], 0 off the mask.

    Raises:
        ValueError: lengths do not match.
    """
    sizes, numbers = torch.as_tensor(lengths, dtype=torch.int64), torch.as_tensor(episodes, dtype=torch.int64)
    if (
        values.dim() != 1
        or values.shape != mask.shape
        or sizes.shape != numbers.shape
        or int(sizes.sum()) != len(values)
    ):
        raise ValueError(
            f"values {tuple(values.shape)}, mask {tuple(mask.shape)}, {len(sizes)} lengths (sum {int(sizes.sum())}) "
            f"and {len(numbers)} episode numbers do not describe the same rows"
        )
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    where = (mask > 0).nonzero().flatten()
    if not where.numel():
        return advantages, returns
    owner = torch.repeat_interleave(numbers, sizes).to(values.device)[where]
    by_episode = torch.argsort(owner, stable=True)
    where, owner = where[by_episode], owner[by_episode]
    counts = torch.bincount(owner, minlength=len(rewards))
    # Tokens of the policy only, one line an episode: its turns are adjacent, whatever rows they were in.
    place = torch.arange(len(where), device=values.device) - (counts.cumsum(0) - counts)[owner]
    table = values.new_zeros(len(rewards), int(counts.max()))
    paid, on = table.clone(), torch.zeros_like(table)
    table[owner, place] = values.detach()[where]
    on[owner, place] = 1.0
    present = counts > 0
    # The whole reward is on the last token: lam and gamma carry it back from there.
    paid[present, counts[present] - 1] = torch.as_tensor(rewards, dtype=values.dtype, device=values.device)[present]
    found = gae_advantages(paid, table, on, gamma=gamma, lam=lam, whiten=False)
    advantages[where], returns[where] = (result[owner, place] for result in found)
    return advantages, returns


def whiten_advantages(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale ``values`` to mean 0 and (unbiased) variance 1 over the tokens on ``mask``; 0 off it."""
    on = mask > 0
    values = torch.where(on, values, 0.0)
    count = on.sum().clamp(min=1)
    centred = torch.where(on, values - values.sum() / count, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    # verl's formula and constant, for equal numbers.
    return centred * torch.rsqrt(variance + 1e-8)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> Tensor:
    """Return the clipped value loss of PPO: 0.5 max((v - R)^2, (clip(v) - R)^2), v clipped to ``old_values`` +-
    ``clip``.

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
        # The larger of the two, as in PPO's policy loss: a move beyond the clip is never rewarded.
        loss = torch.maximum(loss, (clipped - returns).square())
    return torch.where(mask > 0, 0.5 * loss, 0.0)
