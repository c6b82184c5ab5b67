"""The rows of one step in TransferQueue, as the actor's and the critic's updates write and name them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from spear_agents.engines.vision import ImageReader, pack_pictures, read_rows, unpack_pictures
from spear_training.algorithms import RowTable
from spear_training.algorithms.rows import Array
from spear_training.verl_plugin.scoring import Forbid

PICTURES = "pictures"
"""Column of jagged uint8 [N, *], see :func:`spear_agents.engines.vision.pack_pictures`; only where the model has a
vision tower, and then in every row.
"""


def add_vision_inputs(micro_batch: TensorDict, reader: ImageReader) -> TensorDict:
    """Return ``micro_batch`` with patches (``multi_modal_inputs``) and positions [N, 4, *] instead of its pictures.

    The positions are those of the text and those in time, height and width, in the order that verl's patch of
    Qwen2.5-VL reads.
    """
    features = read_rows(reader, [unpack_pictures(row.cpu().numpy()) for row in _split(micro_batch[PICTURES])])
    positions = []
    for ids, feature in zip(_split(micro_batch["input_ids"]), features, strict=True):
        seen = reader.find_positions(ids.cpu(), feature.get("image_grid_thw"))
        positions.append(torch.cat([torch.arange(len(ids))[None], seen]))
    device, offsets = micro_batch["input_ids"].device, micro_batch["input_ids"].offsets()
    result = micro_batch.exclude(PICTURES, "position_ids")
    result["position_ids"] = torch.nested.nested_tensor_from_jagged(
        torch.cat(positions, 1).to(device), offsets, jagged_dim=2
    )
    moved = [{name: value.to(device) for name, value in feature.items()} for feature in features]
    result["multi_modal_inputs"] = NonTensorStack(*moved)
    return result


def _split(column: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of a jagged column."""
    return list(column.values().split(column.offsets().diff().tolist()))


class ReadsPictures:
    """A mixin of verl's FSDP engines: prepares pictures before verl prepares the model's inputs, and keeps
    their places out of what it makes of the outputs."""

    @cached_property
    def _reader(self) -> ImageReader:
        return ImageReader(self.model_config.local_path)  # type: ignore[attr-defined]

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """Return verl's model inputs, with pictures where the rows have any."""
        if PICTURES in micro_batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            micro_batch = add_vision_inputs(micro_batch, self._reader)
        return super().prepare_model_inputs(micro_batch)  # type: ignore[misc]

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """Return verl's log-probs and entropy, over what a policy may write where the rows have pictures."""
        forbid, logits = self.find_forbidden(micro_batch), getattr(output, "logits", None)
        if forbid is not None and logits is not None:  # fused kernels give no logits
            forbid(logits)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]

    def find_forbidden(self, micro_batch: TensorDict) -> Forbid | None:
        """Return :meth:`ImageReader.forbid_places`, where there are pictures."""
        return self._reader.forbid_places if PICTURES in micro_batch.keys() else None  # noqa: SIM118


FORWARD_COLUMNS = ("input_ids", "position_ids", "loss_mask")
"""Columns that a worker reads for a forward pass; the response is the last part of ``input_ids``, as long as
``loss_mask``. TransferQueue moves each row of each column by itself: every column costs."""


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
    """Return the concatenated rows as a matrix [N, max length], zeros on the right."""
    return torch.nested.to_padded_tensor(nest_flat(values, lengths), 0)


def build_columns(rows: RowTable) -> TensorDict:
    """Return the columns of rows with ``ids`` and ``mask`` in verl's layout without padding.

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
    """Return where, in concatenated sequences of P + R tokens, response tokens are predicted: one to the left of each.

    ``prompts`` has P and ``lengths`` R of each row [N]; the positions are int64 [sum of R].
    """
    starts = np.cumsum(prompts + lengths) - lengths - 1
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(starts, lengths) + offsets)


PARTITION = "train"


class StepQueue:
    """Writes columns of rows, makes padding rows, and remembers every key that the end of the step has to clear.

    Args:
        tokenizer: of the policy; padding rows hold its padding token.
        vision: whether every row has a column of pictures.
        store: what keeps the rows, with the functions ``kv_batch_put`` and ``kv_batch_get`` of TransferQueue.
    """

    def __init__(self, tokenizer: Any, *, vision: bool = False, store: Any = tq) -> None:
        self.vision = vision
        self._store = store
        self.forward_columns = (*FORWARD_COLUMNS, PICTURES) if vision else FORWARD_COLUMNS
        """Columns that a forward pass reads."""
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._keys: list[str] = []

    def put(self, keys: Sequence[str], columns: TensorDict) -> None:
        """Write ``columns`` [N] of the rows ``keys``."""
        self._keys += keys
        self._store.kv_batch_put(keys=list(keys), partition_id=PARTITION, fields=columns, tags=[{} for _ in keys])

    def get(self, keys: Sequence[str], fields: Sequence[str]) -> TensorDict:
        """Return the columns ``fields`` of the rows ``keys``, in their order."""
        return self._store.kv_batch_get(keys=list(keys), partition_id=PARTITION, select_fields=list(fields))

    def put_tokens(
        self, keys: Sequence[str], lengths: Array, columns: dict[str, np.ndarray], rows: dict[str, np.ndarray]
    ) -> None:
        """Write float columns of response tokens (concatenated over rows) and of rows ([N, *])."""
        made = {name: nest_flat(_float(values), lengths) for name, values in columns.items()}
        made |= {name: _float(values) for name, values in rows.items()}
        self.put(keys, TensorDict(made, batch_size=len(keys)))

    def add_padding(
        self, count: int, columns: Sequence[str] = (), rows: dict[str, np.ndarray] | None = None
    ) -> list[str]:
        """Write ``count`` rows without a loss token, which make a batch divisible; returns their keys.

        ``columns`` are float columns of one token that they need besides, ``rows`` float columns of rows [count, *].
        """
        if not count:
            return []
        keys = [f"padding_{number}_0" for number in range(count)]
        made = build_columns(self._make_padding(count))
        made.update({name: nest_flat(torch.zeros(count), [1] * count) for name in columns})
        made.update({name: _float(values) for name, values in (rows or {}).items()})
        self.put(keys, made)
        return keys

    def _make_padding(self, count: int) -> RowTable:
        """Return padding rows of one token of prompt and one of response, none of them the policy's."""
        ones = np.ones(count, dtype=np.int64)
        columns: dict[str, Any] = {"ids": np.full(2 * count, self._pad_id), "mask": np.zeros(count, dtype=bool)}
        if self.vision:
            nothing = pack_pictures([])
            columns |= {"picture_bytes": ones * len(nothing), "pictures": np.tile(nothing, count)}
        return RowTable(prompt_length=ones, response_length=ones, **columns)

    def take_keys(self, rollout_keys: Sequence[str]) -> list[str]:
        """Return the keys of all rows of this step, which verl clears from TransferQueue at the end of the step (never
        none).
        """
        keys = list(dict.fromkeys([*rollout_keys, *self._keys])) or self.add_padding(1)
        self._keys = []
        return keys


def _float(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def name_rows(keys: Sequence[str], fields: Sequence[str], extra_info: dict[str, Any]) -> KVBatchMeta:
    """Return what a worker group is given instead of the rows themselves."""
    meta = KVBatchMeta(partition_id=PARTITION, keys=list(keys), tags=[{} for _ in keys], fields=list(fields))
    meta.extra_info = extra_info
    return meta


def count_ranks(workers: Any, mesh: str) -> int:
    """Return the data-parallel size of a worker group."""
    info = workers._dispatch_info
    if mesh not in info:
        info[mesh] = workers._query_dispatch_info(mesh)
    return max(info[mesh]) + 1


def cut_rows(longest: int, rows: int, shares: int, max_tokens: int) -> dict[str, Any]:
    """Return how a worker cuts its rows: into equal shares where one fits the token limit, else as verl is configured.

    ``shares`` are ranks times the micro-batches of each: 1 micro-batch unless memory speaks against it, since verl's
    balancing by length copies rows one by one, and one micro-batch lets the covariance clip see all rows.
    """
    share = -(-rows // shares)
    if share * longest > max_tokens:
        return {}
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": share}
