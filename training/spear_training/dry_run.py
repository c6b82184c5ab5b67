"""Dry runs: a preset's training with a tiny policy, two steps long. What is cut down is said; the algorithm is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_training.launch import compose_config, flatten_config

if TYPE_CHECKING:
    from spear_training.warmstart import WarmStartSettings
    from spear_training.warmstart.vision import TinyVisionSettings

NOT_CUT = (
    "data.spear_env.",
    "actor_rollout_ref.model.",
    "critic.model.",
    "spear.warm_start",
    "spear.vision_start",
    "trainer.default_local",
)
"""What a tiny policy changes without making anything smaller, and what only repeats another key."""


def choose_warm_start(config: DictConfig) -> WarmStartSettings | TinyVisionSettings:
    """Settings of the policy that a training makes for itself: the environment's recipe, played as the training plays.

    Raises:
        SpearError: ``spear.warm_start`` or ``spear.vision_start`` has an unknown key or a value out of range.
    """
    from spear_training.warmstart import choose_recipe  # imports torch and transformers
    from spear_training.warmstart.vision import TinyVisionSettings

    spear: Any = OmegaConf.to_container(config.spear, resolve=True)
    env = spear["env"]
    played = {"env_kwargs": env["kwargs"], "template": env["template"]}
    name = "warm_start" if spear["vision_start"] is None else "vision_start"
    try:
        if name == "vision_start":
            return TinyVisionSettings(env["id"], **played, **spear[name])
        layout = Layout(env["layout"])
        return replace(choose_recipe(env["id"]), **played, history=env["history"], layout=layout, **spear[name])
    except TypeError as error:
        raise SpearError(f"spear.{name}: {error}") from error


def list_cuts(overrides: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Keys that a ``model=tiny`` or ``tiny_vl`` among ``overrides`` changes: key, value of the preset, value here."""
    without = [override for override in overrides if not override.startswith("model=")]
    before, after = (flatten_config(compose_config(chosen, Path("x"), check=False)) for chosen in (without, overrides))
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(NOT_CUT)
    ]


def show_cuts(overrides: Sequence[str], console: Console) -> None:
    """Print what this dry run makes smaller than its preset has it."""
    table = Table(title="A dry run. Cut down; every other setting is the preset's", title_justify="left", box=None)
    for column in ("setting", "preset", "here"):
        table.add_column(column)
    for key, before, after in list_cuts(overrides):
        table.add_row(key, *("–" if value is None else str(value) for value in (before, after)))
    console.print(table)
