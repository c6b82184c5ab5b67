"""Plot of a run's learning curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spear_agents.files import draft_file
from spear_agents.metrics import PANELS, read_history

SMOOTH = 5
"""Training success depends on the tasks of a step: a running mean over this many steps is drawn too."""


def plot_curves(out: str | Path, path: str | Path, *, title: str = "") -> Path:
    """Draw the curves of run folder ``out`` into the picture ``path`` (its suffix sets the format).

    Raises ValueError if the run does not have metrics yet, SpearError if the picture cannot be written.
    """
    history = read_history(out)
    if not any("training/global_step" in record for record in history):
        raise ValueError(f"{out} has no training step yet")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for axis, (name, series) in zip(axes.flat, PANELS, strict=True):
        for number, (key, label) in enumerate(series):
            points = [(record["step"], record[key]) for record in history if record.get(key) is not None]
            if not points:
                continue
            steps, values = np.asarray(points, dtype=float).T
            colour = f"C{number}"
            if key == "success/all":
                axis.plot(steps, values, ".", color=colour, alpha=0.35, markersize=4)
                axis.plot(steps, smooth(values), color=colour, label=f"{label}, mean of {SMOOTH}")
            else:
                sparse = key.startswith("val/") or key == "replay/drawn"
                axis.plot(steps, values, "o-" if sparse else "-", color=colour, markersize=4, label=label)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
        if name == "success":
            axis.set_ylim(bottom=0)
    if title:
        figure.suptitle(title, fontsize=11)
    path = Path(path)
    with draft_file(path) as draft:
        figure.savefig(draft, dpi=130, format=path.suffix[1:])
    pyplot.close(figure)
    return path


def smooth(values: np.ndarray, steps: int = SMOOTH) -> np.ndarray:
    """Mean over the last ``steps`` values, fewer at the beginning [N]."""
    return np.asarray([values[max(0, i - steps + 1) : i + 1].mean() for i in range(len(values))])
