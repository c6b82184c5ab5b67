"""Presets read from YAML, with inheritance."""

from __future__ import annotations

import difflib
from importlib import resources
from typing import Any

import yaml

from spear_envs.core.errors import SpearError

FLAVOURS = ("paper", "official")


def list_presets() -> list[str]:
    """Names of all presets, sorted."""
    names = (entry.name for entry in resources.files(__package__).iterdir())
    return sorted(name[:-5] for name in names if name.endswith(".yaml") and not name.startswith("base"))


def load_preset(name: str, flavour: str = "paper") -> dict[str, Any]:
    """Hyper-parameters of an experiment as a flat mapping (``tab:hyperparams_value``).

    Args:
        name: one of :func:`list_presets`, such as ``"alfworld_qwen2.5_7b"``; ``"alfworld"`` is its column.
        flavour: ``"paper"`` for what the paper says, ``"official"`` for what the authors' published code does.

    Raises:
        SpearError: the name or the flavour is unknown.
    """
    names = list_presets()
    if name not in names:
        near = difflib.get_close_matches(str(name), names, 1)
        hint = f"did you mean {near[0]}? There are" if near else "choose one of"
        raise SpearError(f"there is no preset {name!r}; {hint} {', '.join(names)}")
    if flavour not in FLAVOURS:
        raise SpearError(f"a preset has no flavour {flavour!r}; choose {' or '.join(FLAVOURS)}")
    preset: dict[str, Any] = {}
    official: dict[str, Any] = {}
    for layer in _read_layers(name):
        differences = layer.pop("official", {})
        unknown = (layer.keys() | differences.keys()) - (preset.keys() or layer.keys())
        if unknown:
            raise SpearError(f"preset {name} sets {', '.join(sorted(unknown))}: declare new keys in base.yaml first")
        preset |= layer
        official |= differences
    return preset | official if flavour == "official" else preset


def _read_layers(name: str) -> list[dict[str, Any]]:
    """The file of a preset and those it inherits from, the base first."""
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    layer = yaml.safe_load(text)
    parent = layer.pop("inherits", None)
    return [*(_read_layers(parent) if parent else []), layer]
