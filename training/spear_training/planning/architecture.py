"""Sizes of a model from its shape: parameters, and numbers of a token in the key-value cache.

Transformers builds the model on torch's meta device, without memory for weights; ``models.yaml`` avoids torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from spear_agents.models.catalogue import find_snapshot, models_folder
from spear_agents.models.checking import check_folder
from spear_envs.core.errors import SpearError, first_line


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder.

    Attributes:
        parameters: of the model, including a vision tower.
        largest: parameters of the largest part that is gathered at once: a decoder layer or the embedding.
        vocabulary: rows of the embedding.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward network.
        layers: of the decoder.
        cache_values: numbers that a token adds to the key-value cache: a key and a value in each layer.
        edges: inputs and outputs of all linear layers but the head, where an adapter of rank 1 has a parameter each.
    """

    parameters: int
    largest: int
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    cache_values: int
    edges: int = field(default=0, compare=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Build the model of a ``config.json`` and count. Raises SpearError if it is not a causal language model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        kind = config.get("model_type")
        values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
        try:
            shape = AutoConfig.for_model(str(kind), **values)
            loader = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
            with torch.device("meta"):
                model = loader.from_config(shape)
            model.tie_weights()
            text = shape.get_text_config()
            heads = text.num_attention_heads
            kv_heads = getattr(text, "num_key_value_heads", None) or heads
            head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
            embedding = model.get_input_embeddings().weight
            decoders = [
                count
                for part in model.modules()
                if isinstance(part, torch.nn.ModuleList) and len(part) == text.num_hidden_layers
                for count in (sum(weights.numel() for weights in layer.parameters()) for layer in part)
            ]
            head = model.get_output_embeddings()
            linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
            return cls(
                parameters=model.num_parameters(),
                largest=max(embedding.numel(), *decoders),
                vocabulary=embedding.shape[0],
                hidden=text.hidden_size,
                intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
                layers=text.num_hidden_layers,
                cache_values=2 * text.num_hidden_layers * kv_heads * head_size,
                edges=sum(part.in_features + part.out_features for part in linear),
            )
        except Exception as error:  # a third-party configuration may raise anything
            raise SpearError(
                f"the sizes of a {kind} model cannot be computed ({first_line(error)}): name a causal language model"
            ) from error


def find_architecture(name: str) -> Architecture:
    """Sizes of a model by folder or name (``spear models``, ``models.yaml``).

    Raises SpearError for an unknown one, or a folder that holds another kind of model.
    """
    folder = find_folder(name)
    if folder is not None:
        check_folder(folder)
        return Architecture.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    known = read_known()
    if name not in known:
        raise SpearError(f"the size of {name} is unknown: name its folder, or one of {', '.join(known)}")
    return Architecture.from_config(known[name]["config"])


def find_folder(name: str) -> Path | None:
    """Folder of the model ``name`` on this machine, or None."""
    here = (Path(name).expanduser(), models_folder() / name, find_snapshot(name))
    return next((folder for folder in here if folder and (folder / "config.json").is_file()), None)


@lru_cache(maxsize=1)
def read_known() -> dict[str, dict[str, Any]]:
    """Models of ``models.yaml`` by name, with their ``parameters`` and ``config``; does not import torch."""
    text = (resources.files(__package__) / "models.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
