"""Folders of models: their files, their digest, and whether they hold all of a model that writes text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError

_MIB = 2**20
_MODEL_FILES = (".safetensors", ".bin", ".jinja", ".txt")
_MODEL_JSON = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def require_model_file(folder: str | Path, name: str) -> Path:
    """A file of a model's folder. Raises SpearError if there is none."""
    path = Path(folder) / name
    if not path.is_file():
        is_folder = Path(folder).is_dir()
        found = f"does not contain {name}" if is_folder else "is a file" if path.parent.exists() else "does not exist"
        raise SpearError(f"{folder} {found}: give a folder of a model, or --engine openai for a server")
    return path


def digest_model(folder: str | Path) -> str:
    """SHA-256 over name, size, first and last MiB of a model's files: changes when weights are retrained in place."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in _MODEL_FILES and path.name not in _MODEL_JSON:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_MIB))
            file.seek(max(_MIB, size - _MIB))
            digest.update(file.read())
    return digest.hexdigest()


def has_words(model: str | Path) -> bool:
    """Whether a folder's tokenizer is on the word level, as those of `spear warmstart` are."""
    try:
        inner = json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        return inner["type"] == "WordLevel" or inner.get("merges") == []
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False


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
            raise SpearError(f"{folder} holds an adapter (LoRA) without its model: give it as --lora, and the model")
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
        raise SpearError(f"{folder} lacks {len(absent)} of its {len(files)} files of weights ({absent[0]})")


def explain_other(folder: Path, difference: str) -> SpearError:
    """The error for weights that do not fit their configuration."""
    return SpearError(f"the weights in {folder} are of another model than its config.json ({difference})")


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
