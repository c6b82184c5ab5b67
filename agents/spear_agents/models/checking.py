"""Whether a folder holds a model that writes text, and all of it: seen in its files, before anything loads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError

LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
"""Names of weights in a layer of the decoder."""
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of architectures that write text."""


def check_folder(folder: Path) -> None:
    """Look at ``config.json`` and at the headers of the weights; absent files are left to the caller.

    Raises:
        SpearError: another kind of model, weights that are cut off or of another model than the configuration.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise SpearError(
                f"{folder} holds an adapter (LoRA) without its model: name the model, and spear eval --engine vllm "
                f"takes the adapter as --lora {folder}"
            )
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        named = config.get("architectures") or ()
        names = [named] if isinstance(named, str) else [str(name) for name in named]
        text = {**config, **(config.get("text_config") or {})}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise SpearError(f"{path} cannot be read ({error}): fetch or copy the model again") from error
    if config.get("is_encoder_decoder") or (names and not any(name.endswith(WRITERS) for name in names)):
        kind = ", ".join(names) or config.get("model_type")
        raise SpearError(f"{folder} holds a {kind}, which does not go on with a text: name a causal language model")
    _check_index(folder)
    _check_weights(folder, text, config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is not False)


def _check_weights(folder: Path, text: Mapping[str, Any], is_tied: bool) -> None:
    """Compare the weights with a configuration; transformers would draw those that are missing at random."""
    wanted = [text.get("vocab_size"), text.get("hidden_size")]
    count, layers, ends = text.get("num_hidden_layers"), set(), set()
    for file in sorted(folder.glob("*.safetensors")):
        for name, facts in _read_header(file).items():
            if name.endswith("embed_tokens.weight") and None not in wanted and facts["shape"] != wanted:
                raise explain_other(folder, f"embedding {facts['shape']} instead of {wanted}")
            ends.add(".".join(name.split(".")[-2:]))
            if layer := LAYER.match(name):
                layers.add(int(layer[1]))
    if layers and isinstance(count, int) and not layers.issuperset(range(count)):
        raise explain_other(folder, f"{len(layers)} layers instead of {count}")
    if not is_tied and "embed_tokens.weight" in ends and "lm_head.weight" not in ends:
        raise explain_other(folder, "lm_head.weight is missing")


def _check_index(folder: Path) -> None:
    """Whether all files of weights are there that an index names, where there is one and no single file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return
    try:
        files = {str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise SpearError(f"{index} is not an index of weights: fetch or copy the model again") from error
    absent = sorted(file for file in files if not (folder / file).is_file())
    if absent:
        raise SpearError(
            f"{folder} lacks {len(absent)} of its {len(files)} files of weights ({absent[0]}): fetch or copy it again"
        )


def explain_other(folder: Path, difference: str) -> SpearError:
    """The error for weights that do not fit their configuration."""
    return SpearError(
        f"the weights in {folder} are of another model than its config.json ({difference}): fetch or copy it again"
    )


def _read_header(file: Path) -> dict[str, Any]:
    """Names of a file's tensors, with their facts. Raises SpearError if the file is not complete."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length)) if length < size else {}
        header.pop("__metadata__", None)
        end = 8 + length + max((facts["data_offsets"][1] for facts in header.values()), default=0)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise SpearError(f"{file} is not a file of weights: fetch or copy the model again") from error
    if end != size:
        raise SpearError(f"{file} has {size:,} bytes instead of {end:,}: fetch or copy the model again")
    return header
