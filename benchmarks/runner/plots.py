"""Results as two pictures: how far each figure is from its bar, and what is measured beside its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.figures import Figure, format_value
from benchmarks.runner.registry import Benchmark
from benchmarks.runner.report import list_judgements
from benchmarks.runner.results import Judgement, Result, Verdict

__all__ = ["plot_bars", "plot_peers"]

COLOURS = {Verdict.HELD: "#2a9d5c", Verdict.NOT_HELD: "#d1495b"}
OURS, PEER = "#2a6f97", "#b0b7bd"
MOST = 1_000.0
"""Room to spare that is drawn at most, in times of the bar."""
WIDTH = 10.5


def find_room(one: Judgement) -> float:
    """How many times better than its bar a figure is; below 1: worse."""
    assert one.value is not None
    limit = one.bar.limit
    if one.bar.at_least is not None:
        room = one.value / limit if limit else MOST
    elif one.value <= 0:
        room = MOST
    else:
        room = limit / one.value
    return min(max(room, 1 / MOST), MOST)


def plot_bars(known: Sequence[Benchmark], results: Mapping[str, Result], path: Path) -> Path | None:
    """One line for each measured bar but those of zero; None if there is none."""
    judged = [one for one in list_judgements(known, results) if one.value is not None and one.bar.limit]
    if not judged:
        return None
    pyplot = _import_pyplot()
    figure, axis = pyplot.subplots(figsize=(WIDTH, 0.9 + 0.24 * len(judged)), layout="constrained")
    axis.set_xscale("log")
    for row, one in enumerate(reversed(judged)):
        room, colour = find_room(one), COLOURS[one.verdict]
        axis.plot([1, room], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
        axis.plot(room, row, "o", color=colour, markersize=5)
        value = f"{format_value(one.value or 0.0)} {one.bar.unit}".rstrip()
        axis.annotate(value, (max(room, 1), row), (7, 0), textcoords="offset points", va="center", fontsize=7)
    axis.axvline(1, color="#333333", linewidth=1)
    axis.set_yticks(range(len(judged)), [_label(one) for one in reversed(judged)], fontsize=7)
    axis.set_ylim(-0.8, len(judged) - 0.2)
    axis.set_xlim(right=axis.get_xlim()[1] * 3)
    axis.set_xlabel("times better than the bar (left of the line: the bar does not hold)", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return _save(pyplot, figure, path)


def plot_peers(known: Sequence[Benchmark], results: Mapping[str, Result], path: Path) -> Path | None:
    """Ours beside others, in times of ours; None if nothing is measured beside anything."""
    groups = [
        (benchmark.name, ours, others)
        for benchmark in known
        if benchmark.name in results
        for ours, others in _pair(results[benchmark.name].figures)
    ]
    if not groups:
        return None
    pyplot = _import_pyplot()
    rows = sum(1 + len(others) for _, _, others in groups) + len(groups)
    figure, axis = pyplot.subplots(figsize=(WIDTH, 0.9 + 0.19 * rows), layout="constrained")
    axis.set_xscale("log")
    row, ticks, labels = 0, [], []
    for name, ours, others in reversed(groups):
        for one in (*reversed(others), ours):
            ratio = max(one.value / ours.value, 1e-6)
            colour = PEER if one.of else OURS
            axis.barh(row, ratio - 1e-6, left=1e-6, height=0.8, color=colour)
            who = one.of or "ours"
            text = f"{who}: {format_value(one.value)} {one.unit}".rstrip()
            axis.annotate(text, (ratio, row), (4, 0), textcoords="offset points", va="center", fontsize=6.5)
            row += 1
        ticks.append(row - 1)
        labels.append(_shorten(f"{name}: {ours.name}"))
        row += 1
    ratios = [one.value / ours.value for _, ours, others in groups for one in others]
    axis.set_xlim(min([0.1, *ratios]) / 2, max([10.0, *ratios]) * 30)
    axis.axvline(1, color=OURS, linewidth=0.8, alpha=0.6)
    axis.set_yticks(ticks, labels, fontsize=7)
    axis.set_ylim(-0.8, row)
    axis.set_xlabel("times ours (of times and memory less is better, of rates more)", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return _save(pyplot, figure, path)


def _pair(figures: Sequence[Figure]) -> list[tuple[Figure, list[Figure]]]:
    mine = [figure for figure in figures if not figure.of and figure.value > 0]
    pairs = [(one, [f for f in figures if f.of and f.name == one.name and f.value > 0]) for one in mine]
    return [(one, others) for one, others in pairs if others]


def _label(one: Judgement) -> str:
    return _shorten(f"{one.benchmark}: {one.bar.name}, {one.bar}")


def _shorten(text: str, most: int = 78) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _import_pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
