"""The queue's shape of a row: jagged tensors, as TransferQueue moves them and verl's workers read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from spear_training.algorithms import RowTable
from spear_training.algorithms.rows import Array
from spear_training.verl_plugin.vision import PICTURES

FORWARD_COLUMNS = ("input_ids", "position_ids", "loss_mask")
"""What a worker reads for a forward pass; the response is the last part of ``input_ids``, as long as ``loss_mask``.
TransferQueue moves each row of each column by itself: every column costs."""


def nest_flat(values: torch.Tensor, lengths: Sequence[int] | Array) -> torch.Tensor:
    """Turn concatenated rows [sum of lengths] into a jagged tensor [N, *], on the device of ``values``."""
    sizes = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
    offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    offsets[1:] = sizes.cumsum(0)
    # Without the longest length torch pads a row to the length of the full batch.
    shortest, longest = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
    offsets = offsets.to(values.device)
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)


def pad_rows(values: torch.Tensor, lengths: Sequence[int] | Array) -> torch.Tensor:
    """Concatenated rows as a matrix [N, max length], zeros on the right."""
    return torch.nested.to_padded_tensor(nest_flat(values, lengths), 0)


def build_columns(rows: RowTable) -> TensorDict:
    """Columns of rows with ``ids`` and ``mask`` in verl's layout without padding.

    They are :data:`FORWARD_COLUMNS`, ``rollout_log_probs`` where the rows have them, and pictures where they do.
    """
    sequences = rows.prompt_length + rows.response_length
    starts = np.cumsum(sequences) - sequences
    positions = np.arange(int(sequences.sum()), dtype=np.int64) - np.repeat(starts, sequences)
    columns = {
        "input_ids": nest_flat(torch.from_numpy(rows.ids.astype(np.int64)), sequences),
        "position_ids": nest_flat(torch.from_numpy(positions), sequences),
        "loss_mask": nest_flat(torch.from_numpy(rows.mask.astype(np.int64)), rows.response_length),
    }
    if "rollout_log_probs" in rows:
        columns["rollout_log_probs"] = nest_flat(torch.from_numpy(rows.rollout_log_probs), rows.response_length)
    if PICTURES in rows:
        columns[PICTURES] = nest_flat(torch.from_numpy(rows.pictures), rows.picture_bytes)
    return TensorDict(columns, batch_size=len(rows))


def find_predictions(prompts: Array, lengths: Array) -> torch.Tensor:
    """Where, in concatenated sequences of P + R tokens, response tokens are predicted: one to the left of each.

    ``prompts`` has P and ``lengths`` R of each row [N]; the positions are int64 [sum of R].
    """
    starts = np.cumsum(prompts + lengths) - lengths - 1
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(starts, lengths) + offsets)
