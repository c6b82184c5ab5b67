"""Policies at work: engines that generate tokens, the one loop that plays an episode, and its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_agents.evaluation import Evaluation
    from spear_agents.shortcuts import evaluate

__all__ = ["Evaluation", "evaluate"]


def __getattr__(name: str) -> Any:
    # Late: most modules of the package are imported without click, rich and the environments.
    if name == "evaluate":
        from spear_agents.shortcuts import evaluate

        return evaluate
    if name == "Evaluation":
        from spear_agents.evaluation import Evaluation

        return Evaluation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
