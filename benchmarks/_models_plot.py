"""Picture of what a real language model learns: training games by step, unseen games before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spear_agents.comparison.statistics import Estimate
from spear_training.run.training import smooth

__all__ = ["plot_learning"]

COLOURS = ("#7a8288", "#2a6f97")


def plot_learning(
    won: Mapping[str, Sequence[Sequence[float]]],
    unseen: Mapping[str, Estimate],
    start: Estimate,
    games: int,
    path: Path,
) -> None:
    """Draw each arm's share of won training games, and of unseen games at both ends.

    Args:
        won: of each arm by title: shares [seeds, steps].
        unseen: of each arm: won unseen games after the training.
        start: won unseen games before it.
        games: training games of a step.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.4, 3.6), layout="constrained")
    end = 0
    for number, (title, runs) in enumerate(won.items()):
        mean = 100 * np.asarray(runs).mean(0)
        played = games * np.arange(1, len(mean) + 1)
        end = max(end, int(played[-1]))
        axis.plot(played, mean, ".", color=COLOURS[number], alpha=0.35, markersize=4)
        axis.plot(played, smooth(mean), color=COLOURS[number], linewidth=1.5, label=f"{title}, training games")
    _mark(axis, 0, start, "#333333", "cold start, unseen games")
    for number, (title, estimate) in enumerate(unseen.items()):
        _mark(axis, end * (1.03 + 0.025 * number), estimate, COLOURS[number], f"{title}, unseen games")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("games played", fontsize=8)
    axis.set_ylabel("won, %", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
    axis.set_ylim(top=1.35 * axis.get_ylim()[1])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _mark(axis: Any, place: float, estimate: Estimate, colour: str, label: str) -> None:
    mean, low, high = (100 * value for value in (estimate.mean, estimate.low, estimate.high))
    axis.errorbar([place], [mean], [[mean - low], [high - mean]], fmt="D", color=colour, capsize=3, label=label)
