"""ALFWorld: a household in text, the same as in TextWorld step by step and a few hundred times faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_envs.alfworld.synthesis.games import write_synthetic_game

__all__ = ["write_synthetic_game"]


def __getattr__(name: str) -> Any:
    # Late: the environment does not need the synthesis.
    if name == "write_synthetic_game":
        from spear_envs.alfworld.synthesis.games import write_synthetic_game

        return write_synthetic_game
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
