"""Dry runs: two steps of a preset's training with a tiny policy. Reductions are printed; the algorithm is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from spear_training.launch import compose_config, flatten_config
from spear_training.settings import RunSettings

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
"""Keys that a tiny policy changes without reducing anything, or that repeat another key."""


def choose_warm_start(settings: RunSettings) -> WarmStartSettings | TinyVisionSettings:
    """Settings of the policy that a training makes first: the environment's recipe, with the training's prompts.

    Raises SettingsError if ``spear.warm_start`` or ``spear.vision_start`` is invalid.
    """
    from spear_training.warmstart import choose_recipe  # imports torch and transformers
    from spear_training.warmstart.vision import TinyVisionSettings

    env = settings.env
    played: dict[str, Any] = {"env_kwargs": env.kwargs, "template": env.template}
    if settings.vision_start is not None:
        return TinyVisionSettings(env.id, **{**played, **settings.vision_start})
    played |= {"layout": env.layout, "history": env.history}
    return replace(choose_recipe(env.id), **{**played, **(settings.warm_start or {})})


def list_cuts(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[str, Any, Any]]:
    """Keys changed by ``model=tiny`` or ``tiny_vl`` in ``overrides``: key, the preset's value, the value here."""
    without = [override for override in overrides if not override.startswith("model=")]
    before, after = (
        flatten_config(compose_config(chosen, Path("x"), check=False, config_dir=config_dir))
        for chosen in (without, overrides)
    )
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(NOT_CUT)
    ]


def show_cuts(overrides: Sequence[str], console: Console, config_dir: Path | None = None) -> None:
    """Print what this dry run reduces."""
    table = Table(title="Dry run: reduced settings (all others are the preset's)", title_justify="left", box=None)
    for column in ("setting", "preset", "here"):
        table.add_column(column)
    for key, before, after in list_cuts(overrides, config_dir):
        table.add_row(key, *("–" if value is None else str(value) for value in (before, after)))
    console.print(table)
