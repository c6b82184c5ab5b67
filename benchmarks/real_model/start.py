"""The cold start that all runs share: the committed adapter, added to the pretrained weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spear_envs.core import SpearError
from spear_envs.data.files import write_json

ADAPTER = Path(__file__).parent / "cold_start"
WEIGHTS, ADAPTER_WEIGHTS, ADAPTER_CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"


def merge_adapter(base: Path, adapter: Path, digest: str, out: Path) -> None:
    """Write the model ``base`` with a LoRA adapter added to its weights into the new folder ``out``.

    Every product is computed by itself, without a library of matrix products, whose order of sums depends on the
    processor: the result is the same file everywhere. Its weights are float32, and engines round them to the type in
    the model's ``config.json``, bfloat16. Rounded already they would lie on the grid of that type, and a training would
    change few of the weights that its rollouts compute with: in one of 20 steps a ninth.

    Args:
        digest: SHA-256 of the adapter's weights.

    Raises:
        SpearError: the adapter is another one, or does not fit the model.
    """
    found = hashlib.sha256((adapter / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
    if found != digest:
        raise SpearError(f"{adapter / ADAPTER_WEIGHTS} has SHA-256 {found}, the plan has {digest}: restore it.")
    settings = json.loads((adapter / ADAPTER_CONFIG).read_text("utf-8"))
    scale = settings["lora_alpha"] / settings["r"]
    weights, parts = load_file(base / WEIGHTS), load_file(adapter / ADAPTER_WEIGHTS)
    for name in [name for name in parts if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        if target not in weights:
            raise SpearError(f"{adapter} has weights for {target}, which {base} lacks.")
        down, up = parts[name].float(), parts[name.replace("lora_A", "lora_B")].float()
        merged = weights[target].float()
        for rank in range(len(down)):
            merged = merged + up[:, rank, None] * down[rank] * scale
        weights[target] = merged
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(base, partial, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file({name: value.float() for name, value in weights.items()}, partial / WEIGHTS, {"format": "pt"})
    os.replace(partial, out)


def shorten_adapter(folder: Path, model: str, out: Path) -> str:
    """Copy an adapter of ``spear sft`` for a known model, its weights in bfloat16; returns their SHA-256."""
    out.mkdir(parents=True, exist_ok=True)
    parts = load_file(folder / ADAPTER_WEIGHTS)
    save_file({name: part.to(torch.bfloat16).contiguous() for name, part in parts.items()}, out / ADAPTER_WEIGHTS)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    write_json(out / ADAPTER_CONFIG, settings | {"base_model_name_or_path": model})
    return hashlib.sha256((out / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
