"""Dictionaries instead of TransferQueue."""

from typing import Any

import torch
from tensordict import TensorDict

from spear_training.verl_plugin.actor import STEERING, WEIGHT
from spear_training.verl_plugin.queue import nest_flat


class FakeQueue:
    """TransferQueue: rows by key, columns by name."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, torch.Tensor]] = {}

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict, tags: list[Any]) -> None:
        assert len(keys) == len(tags) == fields.batch_size[0]
        for name in fields.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows.setdefault(key, {})[name] = value.clone()

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        columns = {}
        for name in select_fields:
            values = [self.rows[key][name] for key in keys]
            dense = name in (STEERING, WEIGHT)
            columns[name] = torch.stack(values) if dense else nest_flat(torch.cat(values), list(map(len, values)))
        return TensorDict(columns, batch_size=len(keys))
