"""Weights for a running engine: what of them fits a folder, how another process reads them, and memory given back."""

import json
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import save_file

from spear_agents.engines.tensors import read_shapes, release_pages, select_weights, share_weights
from spear_agents.engines.vllm_worker import WorkerExtension
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import trim_heap

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def save(folder: Path, *names: str, tied: bool, nested: bool = False) -> Path:
    folder.mkdir()
    tensors = {EMBEDDING: torch.zeros(4, 2), HEAD: torch.zeros(4, 2), NORM: torch.zeros(2)}
    for number, name in enumerate(names):  # a file for each, as large models have
        save_file({name: tensors[name]}, folder / f"model-{number}.safetensors")
    config = {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    return folder


def state(*names: str) -> dict[str, torch.Tensor]:
    shapes = {EMBEDDING: (4, 2), HEAD: (4, 2), NORM: (2,), "model.other": (1,)}
    return {name: torch.ones(shapes[name]) for name in names}


@pytest.mark.parametrize("nested", [False, True])
def test_a_tied_head_may_be_given_or_not(tmp_path: Path, nested: bool) -> None:
    without = save(tmp_path / "without", EMBEDDING, NORM, tied=True, nested=nested)
    assert read_shapes(without) == {EMBEDDING: (4, 2), NORM: (2,)}
    for given in (state(EMBEDDING, NORM), state(EMBEDDING, NORM, HEAD)):
        assert select_weights(without, given).keys() == {EMBEDDING, NORM}
    within = save(tmp_path / "within", EMBEDDING, NORM, HEAD, tied=True, nested=nested)
    assert select_weights(within, state(EMBEDDING, NORM)).keys() == {EMBEDDING, NORM}
    assert select_weights(within, state(EMBEDDING, NORM, HEAD)).keys() == {EMBEDDING, NORM, HEAD}


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", EMBEDDING, NORM, HEAD, tied=False)
    assert select_weights(folder, state(EMBEDDING, NORM, HEAD)).keys() == {EMBEDDING, NORM, HEAD}
    with pytest.raises(SpearError, match=r"missing \['lm_head.weight'\], unknown \['model.other'\]"):
        select_weights(folder, state(EMBEDDING, NORM, "model.other"))
    tied = save(tmp_path / "tied", EMBEDDING, NORM, tied=True)
    with pytest.raises(SpearError, match=r"model.norm.weight is \(3,\), there it is \(2,\)"):
        select_weights(tied, state(EMBEDDING) | {NORM: torch.ones(3)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpearError, match=r"contains no \*\.safetensors: save the model with save_pretrained"):
        select_weights(tmp_path / "empty", {})


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_another_process_reads_them_and_nothing_stays() -> None:
    given = {"a.b": torch.arange(6.0).reshape(2, 3), "c": torch.full((3,), 0.1, dtype=torch.bfloat16)}
    with share_weights(given) as path:
        if (child := os.fork()) == 0:
            read = torch.load(path, mmap=True, weights_only=True)
            os._exit(0 if all(torch.equal(read[name], tensor) for name, tensor in given.items()) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not os.path.exists(path)


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


ROLLUP = Path("/proc/self/smaps_rollup")
needs_rollup = pytest.mark.skipif(not ROLLUP.exists(), reason="needs Linux, whose memory a process can count")
MIB = 2**20


def count_resident() -> int:
    """Bytes of this process's anonymous memory that are in RAM."""
    lines = ROLLUP.read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


@needs_rollup
def test_pages_of_a_tensor_are_given_back_and_can_be_written_again() -> None:
    cache = torch.ones(64 * MIB, dtype=torch.uint8)
    before = count_resident()
    given = release_pages(cache.untyped_storage())
    assert 64 * MIB - 2 * mmap.PAGESIZE <= given <= 64 * MIB
    assert before - count_resident() > 60 * MIB
    assert int(cache.sum()) <= 2 * mmap.PAGESIZE, "zeros, but at the two ends"
    cache.fill_(3)
    assert bool((cache == 3).all())


@needs_rollup
def test_neighbours_of_a_small_tensor_are_left_alone() -> None:
    block = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    wanted = block.clone()
    assert release_pages(torch.ones(16).untyped_storage()) == 0
    assert torch.equal(block, wanted)


@needs_rollup
def test_freed_memory_is_given_back() -> None:
    blocks = [torch.ones(16 * 1024) for _ in range(2048)]  # 64 KiB each, from the heap
    del blocks[::2]  # malloc keeps the holes
    before = count_resident()
    trim_heap()
    assert before - count_resident() > 40 * MIB
    assert all(bool((block == 1).all()) for block in blocks)
