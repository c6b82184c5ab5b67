"""Pictures of the ablation, made of the recorded results alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ablations.plan import ARMS, Scenario
from benchmarks.ablations.results import ArmResult
from spear_agents.comparison.statistics import Estimate
from spear_training.run.training import smooth

__all__ = ["dress", "open_axes", "plot_curves", "plot_overview", "save"]

SMOOTH = 9
"""Steps of the running mean."""
CURVES = (
    ("success of the rollouts, %", "success", 100.0),
    ("entropy, nats a token", "entropy", 1.0),
    ("tool calls an episode", "tool_calls", 1.0),
    ("rows replayed so far", "drawn", 1.0),
)
COLOURS = {
    "grpo": "#9ecae1",
    "grpo_sil": "#4292c6",
    "grpo_spear": "#084594",
    "drbot": "#fdae6b",
    "drbot_spear": "#d94801",
    "gigpo": "#a1d99b",
    "gigpo_spear": "#006d2c",
}
"""Colour of each arm: a family has one, and SPEAR is its darkest."""


def plot_curves(scenario: Scenario, arms: Sequence[ArmResult], path: Path) -> None:
    """Draw the curves of all arms, means over seeds."""
    figure, axes = open_axes(len(CURVES), (15, 3.6))
    for axis, (title, name, factor) in zip(axes, CURVES, strict=True):
        _draw_curves(axis, arms, name, factor)
        dress(axis, title, "step")
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, path, f"{scenario.title}: means over seeds, running over {SMOOTH} steps")


def plot_overview(scenario: Scenario, start: Estimate, arms: Sequence[ArmResult], path: Path) -> None:
    """Draw what came out: success on the test panel beside the warm start's, and how it came about."""
    figure, (bars, curves) = open_axes(2, (10, 3.6), width_ratios=[1.25, 1])
    for place, result in enumerate(reversed(arms)):
        success = result.success
        bars.barh(place, 100 * success.mean, color=COLOURS[result.arm], height=0.7)
        bars.errorbar(100 * success.mean, place, xerr=100 * success.half, color="black", capsize=3, linewidth=1)
        seeds = [100 * run["test_panel"]["mean"] for run in result.runs]
        bars.scatter(seeds, [place] * len(seeds), s=12, color="white", edgecolors="black", linewidths=0.7, zorder=3)
    bars.axvline(100 * start.mean, color="black", linestyle=":", linewidth=1)
    bars.set_yticks(range(len(arms)), [ARMS[result.arm] for result in reversed(arms)], fontsize=8)
    dress(bars, "tasks of the test panel won, %", "dotted: warm start; bar: 95 % over tasks; dots: seeds")
    bars.grid(False, axis="y")
    _draw_curves(curves, arms, "success", 100.0)
    dress(curves, "rollouts won, %", "step")
    most, steps = max(len(result.runs) for result in arms), arms[0].runs[0]["steps"]
    save(figure, path, f"{scenario.title}: {steps} steps, {'one seed' if most == 1 else f'up to {most} seeds'}")


def open_axes(columns: int, size: tuple[float, float], **layout: Any) -> tuple[Any, Any]:
    """Make a figure without a display, and its axes in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=size, layout="constrained", gridspec_kw=layout)


def _draw_curves(axis: Any, arms: Sequence[ArmResult], name: str, factor: float) -> None:
    for result in arms:
        values = np.asarray([[value or 0.0 for value in run["curves"][name]] for run in result.runs])
        curve = values.mean(0).cumsum() if name == "drawn" else smooth(factor * values.mean(0), SMOOTH)
        if name == "drawn" and not curve.any():
            continue
        steps = np.arange(1, len(curve) + 1)
        axis.plot(steps, curve, color=COLOURS[result.arm], label=ARMS[result.arm], linewidth=1.5)


def dress(axis: Any, title: str, below: str) -> None:
    """Give an axis its titles and a light frame."""
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(below, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path, title: str) -> None:
    """Write a figure and close it."""
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
