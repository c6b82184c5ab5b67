"""Drawing tokens: seeded uniforms that know nothing of batches, and the inverse of the cumulative distribution."""

from __future__ import annotations

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): a bijection of uint64 [N]."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniform_at(seeds: np.ndarray, position: int) -> np.ndarray:
    """Number ``position`` of each seed's stream: float64 [N] in [0, 1), from uint64 seeds [N].

    SplitMix64 used as a counter: any position of any stream is reached at once, so rows of a batch may come and go.  52
    bits are kept, so that ``u * total < total`` holds in float64 for every positive total.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = _mix(seeds.astype(np.uint64) + _GAMMA) + np.uint64(position + 1) * _GAMMA
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def filter_probs(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zeroes what top-k and then top-p exclude; not renormalised.

    Args:
        probs: [N, V], rows summing to 1.
        top_k: int64 [N], 0 for off.  Of equal probabilities the lower id goes first.
        top_p: float [N]: the smallest leading set whose share of what top-k left reaches ``top_p`` is kept.
    """
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1])
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    ordered = ordered.masked_fill(rank >= limit[:, None], 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    # rank 0 always stays: the mass before it is 0 and top_p > 0.  At top_p = 1 the comparison is not asked, because
    # rounding of the sum could drop a token of the far tail.
    keep = (before < top_p[:, None] * total) | (top_p[:, None] >= 1)
    return torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(~keep, 0))


def draw_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row by inversion of its cumulative distribution, in float64 and in the order of the ids.

    Args:
        logits: [N, V].
        uniform: float64 [N] in [0, 1).
        temperature: float64 [N]; 0 takes the most probable token.
        top_k, top_p: [N], or None when no row of the batch filters.

    Returns:
        token ids int64 [N] and their log-probabilities float64 [N], before filters, at the row's temperature (at 1
        where the temperature is 0).
    """
    greedy = temperature == 0
    heat = torch.where(greedy, torch.ones_like(temperature), temperature)
    log_probs = torch.log_softmax(logits.double() / heat[:, None], -1)
    probs = log_probs.exp()
    if top_k is not None and top_p is not None:
        probs = filter_probs(probs, top_k, top_p)
    mass = probs.cumsum(-1)
    tokens = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1)
    tokens = torch.where(greedy, log_probs.argmax(-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]
