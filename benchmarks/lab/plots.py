"""Plot of a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.ablations.plots import dress, open_axes, save
from benchmarks.lab.report import Findings


def plot_findings(findings: Findings, path: Path) -> None:
    """Draw success over tokens, means over seeds with two standard errors, and the registered differences."""
    arms = findings.comparison.arms
    figure, (curves, bars) = open_axes(2, (12, 4.2))
    for number, (name, runs) in enumerate(findings.runs.items()):
        tokens = np.mean([[at for at, _ in run["curve"]] for run in runs], 0) / 1000
        values = 100 * np.asarray([[value for _, value in run["curve"]] for run in runs])
        mean, spread = values.mean(0), 2 * values.std(0, ddof=1) / np.sqrt(len(runs))
        style = "-" if number < 10 else "--"
        curves.plot(tokens, mean, style, color=f"C{number % 10}", label=arms[name].title or name)
        curves.fill_between(tokens, mean - spread, mean + spread, color=f"C{number % 10}", alpha=0.12)
    curves.axhline(100 * findings.content["start"], color="black", linestyle=":", linewidth=1)
    curves.legend(fontsize=7, frameon=False)
    found = [findings.measure(pair) for pair in reversed(findings.comparison.compare)]
    for place, one in enumerate(found):
        error = [[one.estimate.mean - one.estimate.low], [one.estimate.high - one.estimate.mean]]
        bars.errorbar(one.estimate.mean, place, xerr=error, fmt="o", color="C0", capsize=3, markersize=5)
    bars.axvline(0, color="black", linewidth=1)
    bars.set_yticks(range(len(found)), [f"{one.arm} – {one.base}" for one in found], fontsize=8)
    dress(curves, "levels of the panel won, % (dotted: the start)", "thousand tokens")
    dress(bars, "difference, points (95 % over seeds and tasks)", "points")
    save(figure, path, findings.comparison.title)
