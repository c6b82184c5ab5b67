"""Shapes of token tensors."""

from __future__ import annotations

from torch import Tensor


def check_tokens(values: Tensor, mask: Tensor, name: str = "log_probs") -> Tensor:
    """The mask as bool [B, T]. Raises ValueError unless ``values`` and the mask have this shape."""
    if values.dim() != 2 or values.shape != mask.shape:
        raise ValueError(
            f"{name} and mask must have one shape [B, T], not {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    return mask > 0


def expand_advantages(advantages: Tensor, values: Tensor) -> Tensor:
    """Expand advantages [B] or [B, T] to [B, T]. Raises ValueError for other shapes."""
    if advantages.shape == values.shape:
        return advantages
    if advantages.shape != values.shape[:1]:
        raise ValueError(f"advantages must be [B] or [B, T] for {tuple(values.shape)}, not {tuple(advantages.shape)}")
    return advantages[:, None].expand_as(values)
