"""Sizes of a model from its shape alone: parameters, and bytes of a token in the key-value cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from spear_envs.core.errors import SpearError


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Qwen2 or Qwen3 family; numbers are those of ``config.json``."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool
    """Whether the output layer is the embedding."""
    biased: bool
    """Query, key and value have a bias (Qwen2); else queries and keys are normalised head by head (Qwen3)."""
    vision: int = 0
    """Parameters of the vision tower."""

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (2 * query + 2 * key)
        extra = query + 2 * key if self.biased else 2 * self.head_size
        return attention + extra + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden + self.vision

    def cache_bytes(self, bytes_per_value: int) -> int:
        """Of one token in the key-value cache: a key and a value of each layer."""
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_value

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """From the content of a ``config.json``.

        Raises:
            SpearError: another family of models.
        """
        text = {**config, **config.get("text_config", {})}
        kind = str(config.get("model_type"))
        if not kind.startswith(("qwen2", "qwen3")) or "moe" in kind:
            raise SpearError(f"sizes of a {kind} model are not known here: plans are for Qwen2, Qwen3 and Qwen2.5-VL")
        try:
            return cls(
                vocabulary=text["vocab_size"],
                hidden=text["hidden_size"],
                intermediate=text["intermediate_size"],
                layers=text["num_hidden_layers"],
                heads=text["num_attention_heads"],
                kv_heads=text["num_key_value_heads"],
                head_size=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
                biased=kind.startswith("qwen2"),
                vision=_count_vision(config["vision_config"]) if "vision_config" in config else 0,
            )
        except KeyError as error:
            raise SpearError(f"the model's config.json has no {error.args[0]}, so its size is not known") from None


def _count_vision(shape: Mapping[str, Any]) -> int:
    """Parameters of Qwen2.5-VL's vision tower: patches, blocks, and the merger before the decoder."""
    width, inner, out = shape["hidden_size"], shape["intermediate_size"], shape["out_hidden_size"]
    patch = shape.get("in_chans", 3) * shape["temporal_patch_size"] * shape["patch_size"] ** 2 * width
    attention = 4 * width * width + 4 * width
    block = 2 * width + attention + 3 * width * inner + 2 * inner + width
    merged = width * shape["spatial_merge_size"] ** 2
    return patch + shape["depth"] * block + width + merged * merged + merged + merged * out + out


def find_architecture(name: str) -> Architecture:
    """Sizes of the model ``name``: a folder with a ``config.json``, or a name of the hub that is in ``models.yaml``.

    Raises:
        SpearError: neither.
    """
    path = Path(name) / "config.json"
    if path.is_file():
        return Architecture.from_config(json.loads(path.read_text(encoding="utf-8")))
    known = yaml.safe_load((resources.files(__package__) / "models.yaml").read_text(encoding="utf-8"))
    if name not in known:
        raise SpearError(f"the size of {name} is not known here: name its folder, or one of {', '.join(known)}")
    return Architecture.from_config(known[name])
