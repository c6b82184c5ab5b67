"""Attention over concatenated rows without padding, with torch's own kernels.

Where ranks share a sequence (Ulysses), each gets all tokens of some heads first, and gives the results back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_world_size,
)

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

PACKED = "spear_packed"
"""Its name for ``attn_implementation``. transformers makes no mask for an implementation that it does not know."""
PADDED = 64
"""Tokens to whose multiples a row is padded on a CPU in bfloat16."""
KERNEL_SINCE = (8, 0)
"""Compute capability that torch's flash kernel needs."""


def attend_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention with transformers' interface in which each row only attends to itself.

    Args:
        query: [1, heads, L, width], L tokens of all rows, or this rank's part of them.
        key, value: [1, key heads, L, width].
        cu_seq_lens_q: where the rows begin and end [N + 1], int32; None for one row.
        is_causal: False for the patches of a picture, which come one picture at a time.
        sliding_window: how many tokens a token sees, itself included; None for all before it.

    Returns:
        [1, L, heads, width] and no weights.
    """
    if cu_seq_lens_q is None or is_causal is False:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=is_causal, scaling=scaling, dropout=dropout, **options
        )
    ranks = get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        copies = max(ranks // key.shape[1], 1)  # of each key head, so that every rank gets one
        key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
        query, key, value = (
            gather_seq_scatter_heads(part.contiguous(), seq_dim=2, head_dim=1) for part in (query, key, value)
        )
    if has_kernel(query) and not dropout:
        longest = int(cu_seq_lens_q.diff().max()) if max_length_q is None else max_length_q
        rows = attend_at_once(query, key, value, cu_seq_lens_q, longest, sliding_window, scaling)
    else:
        rows = _attend_by_length((query, key, value), tuple(cu_seq_lens_q.tolist()), sliding_window, scaling, dropout)
    return (gather_heads_scatter_seq(rows, seq_dim=1, head_dim=2) if ranks > 1 else rows), None


def has_kernel(query: torch.Tensor) -> bool:
    """Return whether torch's kernel for rows of unequal length takes ``query``."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= KERNEL_SINCE
    )


def attend_at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    window: int | None,
    scaling: float | None,
    kernel: Callable[..., torch.Tensor] = varlen_attn,
) -> torch.Tensor:
    """Attend within all rows in one call of torch's ``kernel``; return [1, L, heads, width]."""
    own: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(kernel).parameters:
        own["enable_gqa"] = True
    else:  # torch 2.11 promises nothing for fewer key heads than heads
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    parts = (part[0].transpose(0, 1) for part in (query, key, value))
    seen = (-1 if window is None else window - 1, 0)
    return kernel(*parts, bounds, bounds, longest, longest, scale=scaling, window_size=seen, **own)[None]


def _attend_by_length(
    parts: tuple[torch.Tensor, ...], bounds: tuple[int, ...], window: int | None, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Return the attention of query, key and value within rows [1, L, heads, width], rows of one length in one call.

    A turn of a small room is 20 tokens, and an update has a thousand turns: one by one, they take a third longer.
    Every row gets the very bits that it would get alone.
    """
    order = _order_by_length(bounds, parts[0].device)
    taken = parts if order is None else tuple(part.index_select(2, order.tokens) for part in parts)
    counts = order.counts if order is not None else tuple((high - low, 1) for low, high in pairwise(bounds))
    groups = zip(*(part.split([length * count for length, count in counts], dim=2) for part in taken), strict=True)
    found = [
        _attend_rows(
            tuple(part[0].unflatten(1, (count, length)).transpose(0, 1) for part in group), window, scaling, dropout
        ).flatten(0, 1)[None]
        for group, (length, count) in zip(groups, counts, strict=True)
    ]
    rows = torch.cat(found, dim=1)
    return rows if order is None else rows.index_select(1, order.places)


class _Order(NamedTuple):
    """Tokens of rows in the order of the rows' lengths, the place of each token in it, and (length, rows) in turn."""

    tokens: torch.Tensor
    places: torch.Tensor
    counts: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4)  # every layer asks for the same
def _order_by_length(bounds: tuple[int, ...], device: torch.device) -> _Order | None:
    """Return the order of rows between ``bounds`` by length; None where they hardly share lengths."""
    starts: dict[int, list[int]] = {}
    for low, high in pairwise(bounds):
        starts.setdefault(high - low, []).append(low)
    if 2 * len(starts) >= len(bounds):
        return None
    parts = [torch.tensor(begins)[:, None] + torch.arange(length) for length, begins in starts.items()]
    tokens = torch.cat([part.flatten() for part in parts])
    counts = tuple((length, len(begins)) for length, begins in starts.items())
    return _Order(tokens.to(device), tokens.argsort().to(device), counts)


def _attend_rows(
    rows: tuple[torch.Tensor, ...], window: int | None, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Return the attention of query, key and value [N, heads, L, width] of rows of one length: [N, L, heads, width]."""
    length = rows[0].shape[2]
    if rows[0].device.type == "cpu" and rows[0].dtype is torch.bfloat16:
        # At the end, where no token looks. torch keeps a megabyte of kernels for each new length.
        rows = tuple(torch.nn.functional.pad(part, (0, 0, 0, -length % PADDED)) for part in rows)
    query, key, value = rows
    mask, padded = None, query.shape[2]
    if window is not None and padded > window:  # a row that is longer than the window of its layer
        seen = torch.ones(padded, padded, dtype=torch.bool, device=query.device)
        mask = (seen.tril() & seen.triu(1 - window))[None, None]
    causal = mask is None and padded > 1
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return found[:, :, :length].transpose(1, 2)


AttentionInterface.register(PACKED, attend_rows)
