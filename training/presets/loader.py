"""Presets read from YAML, with inheritance, and turned into settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from spear_envs.core.errors import SpearError
from training.algorithms.choices import Estimator
from training.algorithms.settings import SpearSettings

FLAVOURS = ("paper", "official")

SETTING_OF_KEY = {
    "sil_coupling": "sil.coupling",
    "warmup_steps": "sil.warmup_steps",
    "trigger_ratio": "sil.trigger_ratio",
    "always_add": "sil.always_add",
    "outcome_success": "reward.success",
    "outcome_failure": "reward.failure",
    "format_mode": "reward.format",
    "tool_count": "reward.tool_count",
    "tool_shape": "reward.tool_shape",
    "decay_steps": "reward.decay_steps",
    "baseline_capacity": "baseline.capacity",
    "replay_capacity": "replay.capacity",
    "max_age": "replay.max_age",
    "require_tool_call": "replay.require_tool_call",
    "power_of_two": "replay.power_of_two",
    "cov_bounds": "cov.bounds",
    "cov_lower": "cov.lower",
    "cov_upper": "cov.upper",
    "cov_ratio": "cov.ratio",
    "cov_scope": "cov.scope",
    "cov_budget": "cov.budget",
    "cov_floor_one": "cov.floor_one",
    "cov_on_policy": "cov.on_policy",
    "cov_on_policy_ratio": "cov.on_policy_ratio",
    "cov_on_policy_lower": "cov.on_policy_lower",
    "cov_on_policy_upper": "cov.on_policy_upper",
    "clip_low": "clip.low",
    "clip_high": "clip.high",
    "dual_clip": "clip.dual",
    "kl_coefficient": "kl.coefficient",
    "normalize_std": "advantage.normalize_std",
    "group_weight": "advantage.weight",
    "singleton": "advantage.singleton",
    "loss_aggregation": "loss.aggregation",
    "max_response_length": "loss.scale_factor",
    "filter_ratio": "filter.groups",
    "overlong_filter": "filter.overlong",
    "repetition_filter": "filter.repetition",
    "void_filter": "filter.void",
}
"""Where a key of a preset stands among the settings of SPEAR; the other keys concern data, rollouts and hardware."""


def list_presets() -> list[str]:
    """Names of all presets, sorted."""
    names = (entry.name for entry in resources.files(__package__).iterdir())
    return sorted(name[:-5] for name in names if name.endswith(".yaml") and not name.startswith("base"))


def load_preset(name: str, flavour: str = "paper") -> dict[str, Any]:
    """Hyper-parameters of an experiment as a flat mapping (``tab:hyperparams_value``).

    Args:
        name: one of :func:`list_presets`, such as ``"alfworld"``.
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


def make_settings(preset: Mapping[str, Any], *, estimator: Estimator | str = Estimator.GRPO) -> SpearSettings:
    """Settings of SPEAR that a preset stands for; what it does not mention keeps its default.

    Args:
        preset: from :func:`load_preset`.
        estimator: advantage estimator; GiGPO has a normalisation key of its own.

    Raises:
        SettingsError: a value does not fit its setting.
    """
    chosen = Estimator(estimator)
    nodes: dict[str, dict[str, Any]] = {"advantage": {"estimator": chosen}}
    for key, path in SETTING_OF_KEY.items():
        if key in preset:
            node, _, setting = path.partition(".")
            nodes.setdefault(node, {})[setting] = preset[key]
    if chosen is Estimator.GIGPO and "gigpo_normalize_std" in preset:
        nodes["advantage"]["normalize_std"] = preset["gigpo_normalize_std"]
    return SpearSettings.from_mapping(nodes)
