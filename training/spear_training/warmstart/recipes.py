"""The warm starts of this package's environments, each with the environment of its training configuration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from spear_agents.trajectory import Layout
from spear_training.warmstart.policy import PolicyShape, WarmStartSettings
from spear_training.warmstart.rows import Answers

RECIPES: Mapping[str, WarmStartSettings] = MappingProxyType(
    {
        recipe.env_id: recipe
        for recipe in (
            # `spear train preset=demo`
            WarmStartSettings("spear/Sokoban-v1", {"modality": "text"}, history=0),
            # `spear train preset=alfworld_tiny`
            WarmStartSettings(
                "spear/ALFWorld-v0",
                {"dataset": "embedded", "rooms": "small", "max_turns": 20},
                history=4,
                episodes=800,
                noise=0.3,
                inadmissible=0.3,
                answers=Answers.EXPERT,
                epochs=6,
                learning_rate=2e-3,
                panel_tasks=120,
                target=0.15,
            ),
            # `spear train preset=webshop_tiny`; rare words are permuted, so options and codes can only be copied.
            WarmStartSettings(
                "spear/WebShop-v0",
                {"catalog": "mini", "split_scheme": "product", "observation_mode": "text_rich", "max_turns": 8},
                history=0,
                episodes=2000,
                noise=0.1,
                answers=Answers.EXPERT,
                prompt_weight=0.1,
                renamed=1.0,
                short_epochs=4,
                long_epochs=5,
                learning_rate=2e-3,
                shape=PolicyShape(layers=3),
                panel_tasks=100,
                target=0.15,
                extra_epochs=8,
            ),
            # `spear train preset=code_tiny`
            WarmStartSettings(
                "spear/CodeInterpreter-v0",
                {"dataset": "mini-small", "prelude": "none", "max_turns": 4, "time_limit": 5, "observation_chars": 64},
                layout=Layout.CONVERSATION,
                episodes=720,
                noise=0.0,
                epochs=16,
                learning_rate=2e-3,
                panel_tasks=120,
                target=0.1,
            ),
            # `spear train preset=search_tiny`
            WarmStartSettings(
                "spear/SearchR1-v0",
                {"dataset": "mini-small", "retriever": "bm25", "topk": 1, "max_turns": 6},
                layout=Layout.CONVERSATION,
                episodes=1440,
                noise=0.0,
                prompt_weight=0.2,
                renamed=1.0,
                epochs=24,
                learning_rate=2e-3,
                panel_tasks=120,
                target=0.0,
            ),
        )
    }
)
"""Settings by environment id."""


def choose_recipe(env_id: str) -> WarmStartSettings:
    """The recipe of an environment, or the defaults."""
    return RECIPES.get(env_id) or WarmStartSettings(env_id)
