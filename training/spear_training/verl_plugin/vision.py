"""Rows with pictures: they travel and are kept as PNGs, and become verl's ``multi_modal_inputs`` just before a forward
pass, when only one micro-batch of patches has to exist.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from spear_agents.engines.vision import ImageReader, read_rows, unpack_pictures
from spear_training.verl_plugin.scoring import Forbid

PICTURES = "pictures"
"""Column of jagged uint8 [N, *], see :func:`spear_agents.engines.vision.pack_pictures`; only where the model has a
vision tower, and then in every row.
"""


def add_vision_inputs(micro_batch: TensorDict, reader: ImageReader) -> TensorDict:
    """``micro_batch`` with patches (``multi_modal_inputs``) and positions [N, 4, *] instead of its pictures.

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
    """Rows of a jagged column."""
    return list(column.values().split(column.offsets().diff().tolist()))


class ReadsPictures:
    """A mixin of verl's FSDP engines: prepares pictures before verl prepares the model's inputs, and keeps
    their places out of what it makes of the outputs."""

    @cached_property
    def _reader(self) -> ImageReader:
        return ImageReader(self.model_config.local_path)  # type: ignore[attr-defined]

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """Verl's model inputs, with pictures where the rows have any."""
        if PICTURES in micro_batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            micro_batch = add_vision_inputs(micro_batch, self._reader)
        return super().prepare_model_inputs(micro_batch)  # type: ignore[misc]

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """Verl's log-probs and entropy, of what a policy may write where the rows have pictures."""
        forbid, logits = self.find_forbidden(micro_batch), getattr(output, "logits", None)
        if forbid is not None and logits is not None:  # fused kernels give no logits
            forbid(logits)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]

    def find_forbidden(self, micro_batch: TensorDict) -> Forbid | None:
        """:meth:`ImageReader.forbid_places`, where there are pictures."""
        return self._reader.forbid_places if PICTURES in micro_batch.keys() else None  # noqa: SIM118
