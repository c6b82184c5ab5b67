"""ALFWorld: a household in text, played a few hundred times faster than by TextWorld and step for step the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_envs.alfworld.synthesis.files import write_synthetic_game

__all__ = ["write_synthetic_game"]


def __getattr__(name: str) -> Any:
    # Late: the environment needs no more of this package than its own module.
    if name == "write_synthetic_game":
        from spear_envs.alfworld.synthesis.files import write_synthetic_game

        return write_synthetic_game
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
