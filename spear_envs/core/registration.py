"""Registering environments with gymnasium: ours and third-party ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

PREFIX = "spear_envs:"
"""Prefix of our ids where they have not been imported: gymnasium 1.4 does not load plugins."""


REGISTERED_BY: dict[str, str] = {}
"""Modules that called :func:`register_env`, by the id: its class may be of another module."""


@dataclass(frozen=True)
class EnvEntry:
    """One environment of this package."""

    id: str
    entry_point: str
    summary: str
    """What is done in it, in one line."""
    extra: str | None = None
    """The extra of this distribution that unlocks more of it, if any."""
    unlocks: str = ""
    """What the extra adds, in a few words."""


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
"""Environments of this package, in the order of lists."""


def register_env(
    id: str,
    entry_point: str | Callable[..., gym.Env[Any, Any]],
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Register a SPEAR environment, for ``gym.make``, ``gym.make_vec`` and ``spear check``.

    Without a time limit, since SPEAR environments have their own. The same id may be registered again.

    Args:
        id: such as ``"mine/Corridor-v0"``.
        entry_point: ``"package.module:Class"``, or something callable.
        kwargs: keywords of every environment of this id.
    """
    gym.registry.pop(id, None)  # register() warns if the id exists, as after a reload
    gym.register(id, entry_point=entry_point, kwargs=dict(kwargs or {}))
    REGISTERED_BY[id] = sys._getframe(1).f_globals.get("__name__", "")


def register_builtin() -> None:
    """Register every environment of :data:`ENVIRONMENTS`; ``import spear_envs`` does."""
    for entry in ENVIRONMENTS:
        register_env(entry.id, entry.entry_point)
    register_env("spear/McpTools-v0", "spear_envs.mcp_tools.env:McpToolsEnv")  # not listed: it lacks tasks of its own
