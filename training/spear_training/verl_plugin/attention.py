"""Attention over rows that lie one behind another without padding, on a CPU: what flash-attention does on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED = "spear_packed"
"""Its name for ``attn_implementation``. transformers makes no mask for an implementation that it does not know."""


def attend_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface in which each row sees itself alone.

    Args:
        module: the layer.
        query: [1, heads, L, width], L tokens of all rows.
        key, value: [1, key heads, L, width].
        attention_mask: None.
        cu_seq_lens_q: where the rows begin and end [N + 1]; None for one row.
        is_causal: False for the patches of a picture, which come one picture at a time.
        sliding_window: how many tokens a token sees, itself included; None for all before it.
        options: ``scaling``, ``dropout`` and what others read.

    Returns:
        [1, L, heads, width] and no weights.
    """
    if cu_seq_lens_q is None or is_causal is False:
        return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    lengths = cu_seq_lens_q.diff().tolist()
    rows = [
        sdpa_attention_forward(module, *parts, _make_window(parts[0], sliding_window), is_causal=True, **options)[0]
        for parts in zip(*(part.split(lengths, dim=2) for part in (query, key, value)), strict=True)
    ]
    return torch.cat(rows, dim=1), None


def _make_window(query: torch.Tensor, width: int | None) -> torch.Tensor | None:
    """Mask [1, 1, L, L] of a row that is longer than the window of its layer."""
    length = query.shape[2]
    if width is None or length <= width:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return (seen.tril() & seen.triu(1 - width))[None, None]


AttentionInterface.register(PACKED, attend_rows)
