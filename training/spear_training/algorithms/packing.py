"""Compact storage of replayed rows: one block of bytes each, without padding."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RECORD_BYTES = 200
"""What a packed row costs besides its block, its terms and its extra: objects, lengths and numbers."""


@dataclass(frozen=True, eq=False)
class ReplayEntry:
    """One row of D = {(tau_j, R_j, A_j)} (``sec:self-imitation-learning``): a turn, or a whole trajectory.

    ``prompt_ids`` has P token ids; ``response_ids``, ``response_mask`` (on: loss token) and ``old_log_probs`` have R
    entries each. ``reward`` is R_j, ``advantage`` the advantage at collection, ``step`` the global step of collection.
    ``terms`` keeps the raw reward terms. ``extra`` is small picklable data of the trainer's own.
    """

    prompt_ids: Sequence[int] | npt.NDArray[Any]
    response_ids: Sequence[int] | npt.NDArray[Any]
    response_mask: Sequence[int] | npt.NDArray[Any]
    old_log_probs: Sequence[float] | npt.NDArray[Any]
    reward: float
    advantage: float
    step: int
    trajectory_id: Hashable
    tool_calls: int = 0
    terms: Mapping[str, float] | None = None
    extra: Any = None


@dataclass(frozen=True, eq=False)
class PackedEntry:
    """A row as it is kept; the block holds ids (int32), log-probs of loss tokens (float32) and mask bits."""

    __slots__ = (
        "advantage",
        "block",
        "extra",
        "n_loss",
        "n_prompt",
        "n_response",
        "reward",
        "step",
        "terms",
        "tool_calls",
        "trajectory_id",
    )

    block: bytearray
    n_prompt: int
    n_response: int
    n_loss: int
    reward: float
    advantage: float
    step: int
    trajectory_id: Hashable
    tool_calls: int
    terms: dict[str, float] | None
    extra: Any

    @property
    def nbytes(self) -> int:
        """Memory of the row in bytes; sizes of terms and extra are estimates."""
        return len(self.block) + RECORD_BYTES + _size(self.terms) + _size(self.extra)


def pack_entry(entry: ReplayEntry) -> PackedEntry:
    """Copy a row into compact form.

    Raises:
        ValueError: lengths differ, ids do not fit int32, or a reward, an advantage or a log-prob of a loss token is not
            finite.
    """
    prompt, response = _token_ids(entry.prompt_ids, "prompt_ids"), _token_ids(entry.response_ids, "response_ids")
    mask = read_mask(entry)
    log_probs = np.asarray(entry.old_log_probs, dtype=np.float32)
    if not response.shape == mask.shape == log_probs.shape:
        raise ValueError(
            f"row {entry.trajectory_id!r}: response_ids, response_mask and old_log_probs must have one length, "
            f"not {response.shape}, {mask.shape} and {log_probs.shape}"
        )
    kept = log_probs[mask]
    if not (math.isfinite(entry.reward) and math.isfinite(entry.advantage) and np.isfinite(kept).all()):
        raise ValueError(f"row {entry.trajectory_id!r}: reward, advantage or a log-prob is not finite; leave it out")
    return PackedEntry(
        # Joined straight from the arrays: thousands of long rows cost one copy of their tokens.
        block=bytearray().join(np.ascontiguousarray(part).data for part in (prompt, response, kept, np.packbits(mask))),
        n_prompt=prompt.size,
        n_response=response.size,
        n_loss=kept.size,
        reward=float(entry.reward),
        advantage=float(entry.advantage),
        step=int(entry.step),
        trajectory_id=entry.trajectory_id,
        tool_calls=int(entry.tool_calls),
        terms=None if entry.terms is None else {key: float(value) for key, value in entry.terms.items()},
        extra=copy.deepcopy(entry.extra),
    )


def read_mask(entry: ReplayEntry) -> npt.NDArray[np.bool_]:
    """Where the row's loss tokens are [R]."""
    mask = np.asarray(entry.response_mask)
    return mask if mask.dtype == np.bool_ else mask > 0  # comparing bools would turn each into 8 bytes


def unpack_entry(packed: PackedEntry) -> ReplayEntry:
    """The row again: ids int32, mask uint8, old log-probs float32 (0 off the mask).

    The ids are views of the packed row, which is to be thrown away: copies of them would double the cost of a draw.
    """
    prompt_end = 4 * packed.n_prompt
    response_end = prompt_end + 4 * packed.n_response
    probs_end = response_end + 4 * packed.n_loss
    block = np.frombuffer(packed.block, np.uint8)
    mask = np.unpackbits(block[probs_end:], count=packed.n_response)
    log_probs = np.zeros(packed.n_response, np.float32)
    log_probs[mask.view(np.bool_)] = block[response_end:probs_end].view(np.float32)
    return ReplayEntry(
        prompt_ids=block[:prompt_end].view(np.int32),
        response_ids=block[prompt_end:response_end].view(np.int32),
        response_mask=mask,
        old_log_probs=log_probs,
        reward=packed.reward,
        advantage=packed.advantage,
        step=packed.step,
        trajectory_id=packed.trajectory_id,
        tool_calls=packed.tool_calls,
        terms=packed.terms,
        extra=packed.extra,
    )


def _token_ids(values: Any, name: str) -> npt.NDArray[np.int32]:
    raw = np.asarray(values)
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a sequence of token ids, not {raw.dtype} {raw.shape}")
    if raw.dtype != np.int32 and raw.size and (raw.min() < -(2**31) or raw.max() >= 2**31):
        raise ValueError(f"{name} holds ids that do not fit 32 bits")
    return raw.astype(np.int32, copy=False)


def _size(value: Any) -> int:
    """Rough memory of small nested data in bytes."""
    if value is None:
        return 0
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return sys.getsizeof(value) + sum(map(_size, value))
    return int(value.nbytes) if hasattr(value, "nbytes") else sys.getsizeof(value)
