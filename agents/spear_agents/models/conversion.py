"""From a GGUF file to a folder of Hugging Face."""

from __future__ import annotations

import io
import json
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spear_agents.files import write_json
from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.space import check_space

ORIGIN = "origin.json"
"""File of a converted folder: what it was made from."""
BYTES_PER_PARAMETER = 2
FULL_PRECISION = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class GGUFFacts:
    """What a GGUF file says of itself: metadata, number of tensors by format, parameters, and their mean bits."""

    fields: Mapping[str, Any]
    formats: Mapping[str, int]
    parameters: int
    bits: float

    @property
    def loss(self) -> str:
        """What the conversion cannot bring back, in a sentence; empty where nothing was lost."""
        if all(name in FULL_PRECISION for name in self.formats):
            return ""
        told = ", ".join(f"{name} in {count}" for name, count in self.formats.items())
        return (
            f"The file keeps {self.bits:.1f} bits of a weight (tensors: {told}). What was rounded off does not come "
            "back: expect results somewhat below those of the published model."
        )


def read_gguf(path: Path) -> GGUFFacts:
    """Read the metadata of a GGUF file. Raises SpearError if there is none, or it is not a complete GGUF file."""
    from gguf import GGUFReader

    if not path.is_file():
        raise SpearError(f"there is no file {path}: name a GGUF file")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, struct.error, OverflowError) as error:
        raise SpearError(f"{path} is not a whole GGUF file ({first_line(error)}): fetch it again") from error
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    if not parameters:
        raise SpearError(f"{path} holds no weights: take a GGUF file of a whole language model")
    formats = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    size = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    return GGUFFacts(fields, dict(formats.most_common()), parameters, 8 * size / parameters)


def convert_gguf(path: Path, out: Path, origin: Mapping[str, Any]) -> GGUFFacts:
    """Write the model of a GGUF file as a Hugging Face folder with weights in bfloat16.

    ``out`` is new, and incomplete until this returns; ``origin`` is further data on where the model is from.

    Raises SpearError if the file is incomplete, of an architecture that transformers does not read, or without a
    tokenizer, a chat template or an end token, and if the disk is full.
    """
    facts = read_gguf(path)
    architecture = facts.fields.get("general.architecture")
    if "tokenizer.chat_template" not in facts.fields:
        raise SpearError(f"{path} holds no chat template, so it is not a chat model: take one, often named …-Instruct")
    out.mkdir(parents=True, exist_ok=True)
    check_space(out, facts.parameters * BYTES_PER_PARAMETER, str(out.name))

    import gguf
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from spear_agents.engines.hf import find_drawn, quiet_transformers, save_weights
    from spear_agents.models.tokenizer import build_tokenizer

    # On Python 3.10 transformers cannot map the module to its distribution, and asks the module for its version.
    gguf.__version__ = version("gguf")
    with quiet_transformers():
        try:
            tokenizer = build_tokenizer(path, facts.fields)
            with redirect_stderr(io.StringIO()):  # a bar that quiet_transformers() does not know
                model, found = AutoModelForCausalLM.from_pretrained(
                    path.parent,
                    gguf_file=path.name,
                    dtype=torch.bfloat16,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            if drawn := find_drawn(found):
                raise ValueError(f"{drawn[0]} is missing or of another shape")
        except SpearError:
            raise
        except Exception as error:  # a file is third-party data, and transformers may raise anything
            raise SpearError(
                f"{path} holds a model of architecture {architecture}, which cannot be converted "
                f"({first_line(error)}): take its Hugging Face folder"
            ) from error
        ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        model.generation_config = GenerationConfig(**{f"{role}_token_id": index for role, index in ids.items()})
        model.config.update({f"{role}_token_id": index for role, index in ids.items()})
        save_weights(model, out)
        tokenizer.save_pretrained(out)
    made = {"file": path.name, "licence": facts.fields.get("general.license"), "formats": facts.formats}
    made |= {"bits": round(facts.bits, 2), "parameters": model.num_parameters(), **origin}
    write_json(out / ORIGIN, made)
    return facts


def read_origin(folder: Path) -> dict[str, Any]:
    """What a converted folder says of its origin; empty if nothing."""
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return origin if isinstance(origin, dict) else {}
