"""LoRA: the weights that rollouts and checkpoints get of a policy with an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

ADAPTER = "lora_adapter"
"""Folder of the adapter in peft's form, in the folder of the merged model."""
_HEAD = "lm_head.weight"


class MergesAdapter:
    """A mixin of verl's FSDP engines of a policy: exact merged weights, and checkpoints with a full model.

    verl rounds merged weights to bfloat16, and saves those of a checkpoint under peft's names, which nothing loads.
    """

    module: Any
    model_config: Any
    rank: int
    _is_lora: bool

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights with the adapter in them, under the model's own names, one at a time; every rank must take part."""
        with merged_lora_context(self.module, backup_adapters=True):
            for name, value in normalize_peft_param_name(self.module.state_dict()).items():
                # A copy: afterwards the model has the weights again that it had.
                yield name, _gather(value).clone()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Verl's checkpoint; with an adapter its ``huggingface`` has the merged model and the adapter."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        if not self._is_lora:
            return
        folder = Path(local_path) / "huggingface"
        tied = self.model_config.hf_config.get_text_config().tie_word_embeddings
        merged = {
            name: value.cpu().contiguous()
            for name, value in self._merged_lora_per_tensor_param()
            if not (tied and name == _HEAD)
        }
        adapter = {
            name.replace(".default", ""): _gather(value).cpu().contiguous()
            for name, value in self.module.state_dict().items()
            if "lora_" in name
        }
        if self.rank == 0:
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
            self.module.peft_config["default"].save_pretrained(folder / ADAPTER)
            save_file(adapter, folder / ADAPTER / "adapter_model.safetensors", metadata={"format": "pt"})
        torch.distributed.barrier()


def _gather(value: torch.Tensor) -> torch.Tensor:
    """A full weight, gathered from all ranks."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()
