"""Weights for a running engine: checked against its model folder, and shared with other processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from spear_envs.core.errors import SpearError

_HEAD = "lm_head.weight"


def select_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the weights of ``folder`` from ``state``, with the names and shapes they have there.

    A tied output layer may be in ``state`` or not. Raises SpearError if a weight is missing, unknown or of another
    shape, or the folder has no safetensors.
    """
    shapes = read_shapes(folder)
    given = {name: tensor for name, tensor in state.items() if name in shapes or name != _HEAD or not _is_tied(folder)}
    missing = [name for name in sorted(shapes.keys() - given.keys()) if name != _HEAD or not _is_tied(folder)]
    unknown = sorted(given.keys() - shapes.keys())
    other = f"these weights are of another model than {folder}"
    if missing or unknown:
        raise SpearError(f"{other}: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in given.items():
        if tuple(tensor.shape) != shapes[name]:
            raise SpearError(f"{other}: {name} is {tuple(tensor.shape)}, there it is {shapes[name]}")
    return given


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each weight in a Hugging Face folder. Raises SpearError if it has no safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    if not shapes:
        raise SpearError(f"{folder} contains no *.safetensors: save the model with save_pretrained of transformers")
    return shapes


def _is_tied(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool({**(config.get("text_config") or {}), **config}.get("tie_word_embeddings"))


@contextmanager
def share_weights(state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Put ``state`` in memory at a path for ``torch.load`` in this user's processes, for the duration of the block.

    The memory is anonymous and is freed with this process. Linux only, like vLLM on a CPU.
    """
    with os.fdopen(os.memfd_create("weights", os.MFD_CLOEXEC), "w+b") as file:
        torch.save(dict(state), file)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
