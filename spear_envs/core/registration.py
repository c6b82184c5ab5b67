"""Registering environments with gymnasium: ours and third-party ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

PREFIX = "spear_envs:"
"""Stands before our ids where nothing has imported them: gymnasium 1.4 loads no plugins. Commands have."""


@dataclass(frozen=True)
class EnvEntry:
    """One environment of this package."""

    id: str
    entry_point: str
    summary: str
    """One line on what is done in it."""
    extra: str | None = None
    """The extra of this distribution that unlocks more of it; None if there is nothing to unlock."""
    unlocks: str = ""
    """What the extra brings, in a few words."""


ENVIRONMENTS: tuple[EnvEntry, ...] = (
    EnvEntry(
        "spear/ALFWorld-v0",
        "spear_envs.alfworld.env:ALFWorldEnv",
        "Household tasks in text: walk, open, take, heat, put.",
        extra="alfworld",
        unlocks="TextWorld as engine",
    ),
    EnvEntry(
        "spear/WebShop-v0",
        "spear_envs.webshop.env:WebShopEnv",
        "Search a shop and buy what an instruction asks for.",
        extra="webshop",
        unlocks="the authors' tagger",
    ),
    EnvEntry(
        "spear/Sokoban-v1",
        "spear_envs.sokoban.env:SokobanEnv",
        "Push boxes onto targets, seen as a picture and as text.",
    ),
    EnvEntry(
        "spear/SearchR1-v0",
        "spear_envs.search.env:SearchR1Env",
        "Answer multi-hop questions with a search engine.",
        extra="search",
        unlocks="dense retrieval",
    ),
    EnvEntry(
        "spear/CodeInterpreter-v0",
        "spear_envs.code.env:CodeInterpreterEnv",
        "Solve mathematics with a sandboxed Python tool.",
        extra="sandbox",
        unlocks="sympy, more graders",
    ),
)
"""All environments that this package registers, in the order in which they are listed."""


def register_env(
    id: str,
    entry_point: str | Callable[..., gym.Env[Any, Any]],
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Register a SPEAR environment, so that ``gym.make``, ``gym.make_vec`` and ``spear check`` know it.

    No time limit is put around it: a SPEAR environment keeps its own. Registering the same id again is not an error.

    Args:
        id: such as ``"mine/Corridor-v0"``.
        entry_point: ``"package.module:Class"``, or something callable.
        kwargs: keywords that every environment of this id is made with.
    """
    gym.registry.pop(id, None)  # register() warns if the id is there, as it is after a reload
    gym.register(id, entry_point=entry_point, kwargs=dict(kwargs or {}))


def register_builtin() -> None:
    """Register every environment of :data:`ENVIRONMENTS`; ``import spear_envs`` does."""
    for entry in ENVIRONMENTS:
        register_env(entry.id, entry.entry_point)
    register_env("spear/McpTools-v0", "spear_envs.mcp_tools.env:McpToolsEnv")  # not listed: it has no tasks of its own
