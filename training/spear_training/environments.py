"""Which environment a training plays and how its prompts are built: the ``spear.env`` node of a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium as gym

from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits, make_env


@dataclass(frozen=True)
class EnvironmentSettings:
    """The ``spear.env`` node: an environment id, its keywords, and the prompt."""

    id: str = "spear/Sokoban-v0"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of ``gym.make`` besides ``split``."""
    train_split: str = "train"
    valid_split: str = "valid"
    template: str = "default"
    layout: Layout = Layout.PER_TURN
    history: int = 2
    """Turns of history in a ``per_turn`` prompt."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EnvironmentSettings:
        """Build from a plain mapping; without a ``valid_split`` it is the second of the environment's splits.

        Raises:
            SpearError: a key does not exist (the nearest one is named), the layout is unknown, or there is no such
                environment.
        """
        names = [item.name for item in fields(cls)]
        for key in mapping:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1)
                hint = f"did you mean spear.env.{near[0]}?" if near else f"there are {', '.join(names)}"
                raise SpearError(f"spear.env.{key} is not a setting; {hint}")
        values = dict(mapping)
        try:
            values["layout"] = Layout(values.get("layout", Layout.PER_TURN))
        except ValueError:
            choices = ", ".join(layout.value for layout in Layout)
            raise SpearError(f"spear.env.layout cannot be {values['layout']!r}; choose {choices}") from None
        if not values.get("valid_split"):
            splits = find_splits(str(values.get("id", cls.id)))
            values["valid_split"] = (splits[1:] or splits)[0]
        return cls(**values)


def make_environment(settings: EnvironmentSettings, *, split: str) -> gym.Env:
    """Make one environment of ``split``.

    Raises:
        SpearError: the id is not registered or a keyword does not fit.
    """
    return make_env(settings.id, split, settings.kwargs)
