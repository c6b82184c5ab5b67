"""The rows of one step in TransferQueue, as the actor's and the critic's updates write and name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from spear_agents.engines.vision import pack_pictures
from spear_training.algorithms import RowTable
from spear_training.algorithms.rows import Array
from spear_training.verl_plugin.columns import FORWARD_COLUMNS, build_columns, nest_flat
from spear_training.verl_plugin.vision import PICTURES

PARTITION = "train"


class StepQueue:
    """Writes columns of rows, makes padding rows, and remembers every key that the end of the step has to clear.

    With ``vision`` every row has a column of pictures. ``forward_columns`` are those that a forward pass reads.
    """

    def __init__(self, tokenizer: Any, *, vision: bool = False) -> None:
        self.vision = vision
        self.forward_columns = (*FORWARD_COLUMNS, PICTURES) if vision else FORWARD_COLUMNS
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._keys: list[str] = []

    def put(self, keys: Sequence[str], columns: TensorDict) -> None:
        """Write ``columns`` [N] of the rows ``keys``."""
        self._keys += keys
        tq.kv_batch_put(keys=list(keys), partition_id=PARTITION, fields=columns, tags=[{} for _ in keys])

    def get(self, keys: Sequence[str], fields: Sequence[str]) -> TensorDict:
        """Columns ``fields`` of the rows ``keys``, in their order."""
        return tq.kv_batch_get(keys=list(keys), partition_id=PARTITION, select_fields=list(fields))

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
        """Rows of one token of prompt and one of response, none of them the policy's."""
        ones = np.ones(count, dtype=np.int64)
        columns: dict[str, Any] = {"ids": np.full(2 * count, self._pad_id), "mask": np.zeros(count, dtype=bool)}
        if self.vision:
            nothing = pack_pictures([])
            columns |= {"picture_bytes": ones * len(nothing), "pictures": np.tile(nothing, count)}
        return RowTable(prompt_length=ones, response_length=ones, **columns)

    def take_keys(self, rollout_keys: Sequence[str]) -> list[str]:
        """Keys of all rows of this step, which verl clears from TransferQueue at the end of the step (never none)."""
        keys = list(dict.fromkeys([*rollout_keys, *self._keys])) or self.add_padding(1)
        self._keys = []
        return keys


def _float(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def name_rows(keys: Sequence[str], fields: Sequence[str], extra_info: dict[str, Any]) -> KVBatchMeta:
    """What a worker group is given instead of the rows themselves."""
    meta = KVBatchMeta(partition_id=PARTITION, keys=list(keys), tags=[{} for _ in keys], fields=list(fields))
    meta.extra_info = extra_info
    return meta


def count_ranks(workers: Any, mesh: str) -> int:
    """Data-parallel size of a worker group."""
    info = workers._dispatch_info
    if mesh not in info:
        info[mesh] = workers._query_dispatch_info(mesh)
    return max(info[mesh]) + 1


def cut_rows(longest: int, rows: int, shares: int, max_tokens: int) -> dict[str, Any]:
    """How a worker cuts its rows: into equal shares where one fits the token limit, else as verl is configured.

    ``shares`` are ranks times the micro-batches of each: 1 micro-batch unless memory speaks against it, since verl's
    balancing by length copies rows one by one, and one micro-batch lets the covariance clip see all rows.
    """
    share = -(-rows // shares)
    if share * longest > max_tokens:
        return {}
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": share}
