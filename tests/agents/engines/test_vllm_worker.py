"""What the extension of vLLM's workers does with new weights, on layers instead of vLLM's."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from spear_agents.engines.vllm_worker import WorkerExtension


class Packed(torch.nn.Module):
    """A layer that computes with a copy of its weight in another order, as vLLM's do on a CPU."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.quant_method: Any = SimpleNamespace(process_weights_after_loading=Packed.pack)
        self.pack()

    def pack(self) -> None:
        self.packed = self.weight.detach().T.clone()


def test_the_cache_is_given_back_once_for_all_layers() -> None:
    whole = torch.ones(4, 2**20, dtype=torch.uint8)
    apart = torch.ones(2**20, dtype=torch.uint8)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(kv_caches=[whole[0], [whole[3], apart], torch.empty(8, device="meta")])
    worker.release_memory()
    assert all(int(cache[2**16 : 2**19].sum()) == 0 for cache in (*whole, apart))


def test_a_tied_output_layer_gets_the_new_weights_too(tmp_path: Path) -> None:
    tied = torch.nn.Parameter(torch.zeros(3, 2))
    layers = {"embed": Packed(tied), "linear": Packed(torch.nn.Parameter(torch.zeros(2, 2))), "lm_head": Packed(tied)}
    model = torch.nn.ModuleDict(layers)

    def reload_weights(weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights_iterator:  # as vLLM: only layers that are named are packed anew
            layers[name].weight.data.copy_(tensor)
            layers[name].pack()

    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(reload_weights=reload_weights, get_model=lambda: model)
    torch.save({"embed": torch.ones(3, 2), "linear": torch.full((2, 2), 2.0)}, tmp_path / "weights")
    worker.load_weights(str(tmp_path / "weights"))
    for name, value in {"embed": 1.0, "linear": 2.0, "lm_head": 1.0}.items():
        assert torch.all(layers[name].packed == value), name
