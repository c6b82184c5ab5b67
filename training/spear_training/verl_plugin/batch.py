"""Rows of a training batch: their columns, how they are dealt into mini-batches, and what each weighs in the loss.

A mini-batch is one optimiser step. The driver decides which rows are in it, so that a row's weight in the loss can be
given as one number and the loss does not depend on how a worker cuts a mini-batch into micro-batches or how many ranks
share it. (The covariance clip does: its means and its budget are those of a micro-batch, which is a rank's whole share
of the mini-batch where that fits the token limit.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from spear_training.algorithms import Aggregation
from spear_training.verl_plugin.vision import PICTURES

FORWARD_COLUMNS = ("input_ids", "position_ids", "loss_mask")
"""What a worker reads for a forward pass. TransferQueue moves each row of each column by itself: every column costs."""

TOKEN_COLUMNS = (*FORWARD_COLUMNS, "rollout_log_probs")
"""What a rollout writes for each row. The response is the last part of ``input_ids``, as long as ``loss_mask``."""


@dataclass(frozen=True)
class RowTokens:
    """Tokens of one row: ids of prompt [P] and response [R], loss mask [R] (1: the policy's tokens), log-probs [R].

    ``pictures``: see :data:`~spear_training.verl_plugin.vision.PICTURES`; None where the model has no vision tower.
    """

    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    loss_mask: Sequence[int] | np.ndarray
    log_probs: Sequence[float] | np.ndarray
    pictures: np.ndarray | None = None


def _nest(rows: Sequence[Sequence[float] | np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """Build a jagged tensor [N, *] in one copy."""
    lengths = [len(row) for row in rows]
    flat = np.concatenate([np.asarray(row) for row in rows]) if rows else np.zeros(0)
    return nest_flat(torch.as_tensor(flat, dtype=dtype), lengths)


def nest_flat(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Turn concatenated rows [sum of lengths] into a jagged tensor [N, *], on the device of ``values``."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)
    # Without the longest length torch pads a row to the length of the whole batch.
    shortest, longest = int(min(lengths, default=0)), int(max(lengths, default=0))
    offsets = offsets.to(values.device)
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)


def build_columns(rows: Sequence[RowTokens]) -> TensorDict:
    """Columns :data:`TOKEN_COLUMNS` of N rows as jagged tensors, in verl's layout without padding, and pictures."""
    sequences = [[*row.prompt_ids, *row.response_ids] for row in rows]
    positions = [range(len(sequence)) for sequence in sequences]
    columns = TensorDict(
        {
            "input_ids": _nest(sequences, torch.int64),
            "position_ids": _nest(positions, torch.int64),
            "loss_mask": _nest([row.loss_mask for row in rows], torch.int64),
            "rollout_log_probs": _nest([row.log_probs for row in rows], torch.float32),
        },
        batch_size=len(rows),
    )
    pictures = [row.pictures for row in rows if row.pictures is not None]
    if pictures:
        columns[PICTURES] = _nest(pictures, torch.uint8)
    return columns


@dataclass(frozen=True)
class Deal:
    """Rows dealt into mini-batches.

    Attributes:
        minibatches: row numbers of each mini-batch, -1 for a padding row; all of length ``size``.
        size: rows of a mini-batch, a multiple of the number of shares.
    """

    minibatches: tuple[tuple[int, ...], ...]
    size: int

    @property
    def padding(self) -> int:
        """Number of padding rows."""
        return sum(row < 0 for part in self.minibatches for row in part)

    def order(self, ranks: int) -> list[int]:
        """Row numbers in the order verl wants: rows of rank 0, mini-batch by mini-batch, then those of rank 1, ..."""
        share = self.size // ranks
        return [row for r in range(ranks) for part in self.minibatches for row in part[r * share : (r + 1) * share]]


def count_minibatches(rows: int, rows_per_minibatch: int) -> int:
    """The nearest whole number of mini-batches, at least 1."""
    return max(1, round(rows / rows_per_minibatch))


def count_pieces(rows: int, rows_per_minibatch: int) -> int:
    """Pieces of a mini-batch of :func:`deal_rows` none of which has more rows than ``rows_per_minibatch``."""
    return -(-rows // (count_minibatches(rows, rows_per_minibatch) * rows_per_minibatch)) or 1


def deal_rows(groups: Sequence[Sequence[int]], rows_per_minibatch: int, shares: int, rng: np.random.Generator) -> Deal:
    """Shuffle rows into mini-batches of nearly equal size.

    Args:
        groups: row numbers; each group is spread evenly over all mini-batches (on-policy and replayed rows of ``joint``
            coupling are two groups, so that each mini-batch holds both).
        rows_per_minibatch: wanted size; the number of mini-batches is the nearest whole number of them, at least 1.
        shares: into how many equal parts a mini-batch will be cut: for ranks, and on each for micro-batches.
        rng: decides the shuffle.
    """
    total = sum(len(group) for group in groups)
    if not total:
        return Deal((), 0)
    count = count_minibatches(total, rows_per_minibatch)
    parts: list[list[int]] = [[] for _ in range(count)]
    for group in groups:
        for part, share in zip(
            parts, np.array_split(rng.permutation(np.asarray(group, dtype=np.int64)), count), strict=True
        ):
            part.extend(share.tolist())
    size = -(-max(len(part) for part in parts) // shares) * shares
    return Deal(tuple((*rng.permutation(part).tolist(), *[-1] * (size - len(part))) for part in parts), size)


def weigh_rows(
    minibatches: Sequence[Sequence[int]],
    loss_tokens: Sequence[int],
    replay: Sequence[bool],
    *,
    aggregation: Aggregation,
    scale_factor: float,
) -> np.ndarray:
    """Weight w of each row [N], such that the mini-batch loss is the sum of w times the row's summed token losses.

    On-policy and replayed rows are each divided by their own number in the mini-batch, so that both terms of the
    objective (``eq:grpo_sal``) keep the same scale however many rows were drawn. Rows without a loss token weigh 0.

    Args:
        minibatches: row numbers, negative for padding.
        loss_tokens: number of the policy's tokens in each row [N].
        replay: whether a row is replayed [N].
        aggregation: any mode but ``sum-norm``, whose scale depends on the cut into micro-batches.
        scale_factor: L of the -norm mode.
    """
    tokens, replayed = np.asarray(loss_tokens, dtype=np.float64), np.asarray(replay, dtype=bool)
    weights = np.zeros(len(tokens))
    for part in minibatches:
        members = np.asarray([row for row in part if row >= 0], dtype=np.int64)
        for kind in (False, True):
            rows = members[(replayed[members] == kind) & (tokens[members] > 0)]
            if not len(rows):
                continue
            if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
                weights[rows] = 1.0 / (len(rows) * scale_factor)
            elif aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM:
                weights[rows] = 1.0 / len(rows)
            elif aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN:
                weights[rows] = 1.0 / (len(rows) * tokens[rows])
            elif aggregation is Aggregation.TOKEN_MEAN:
                weights[rows] = 1.0 / tokens[rows].sum()
            else:
                raise ValueError(
                    f"aggregation {aggregation.value} depends on micro-batches and cannot be weighed by row"
                )
    return weights


def find_predictions(prompts: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Where, in concatenated sequences of P + R tokens, response tokens are predicted: one to the left of each.

    Args:
        prompts: P of each row [N].
        lengths: R of each row [N].

    Returns:
        positions [sum of R], int64.
    """
    starts = np.cumsum(prompts + lengths) - lengths - 1
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(starts, lengths) + offsets)
