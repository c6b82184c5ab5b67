"""Two runs beside one another: what has become slower, larger or less, by ratio.

The machines need not be equal. Each result carries the CPU seconds of a fixed piece of work, measured beside it, and
times and rates are compared in units of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.runner.figures import RATES, TIMES, Figure, correct_time
from benchmarks.runner.registry import Benchmark
from benchmarks.runner.results import Result, write_summary

__all__ = ["Change", "Comparison", "compare_results", "make_baseline"]

SIZES = ("B", "bytes", "KB", "MB", "MiB", "GB")
LEAST = {"ms": 0.05, "ms CPU": 0.05, "CPU ms": 0.05, "us": 5.0, "MB": 2.0, "MiB": 2.0}
"""Values below these are noise: what is smaller counts as this."""


class Change(str, Enum):
    """Change of a figure between two results."""

    WORSE = "worse"
    """By more than the tolerance."""
    BETTER = "better"
    """By more than the tolerance."""
    SAME = "the same"
    """Within the tolerance."""
    MISSING = "missing"
    """In the baseline alone."""


@dataclass(frozen=True)
class Comparison:
    """A figure in two runs."""

    benchmark: str
    name: str
    unit: str
    before: float
    now: float | None
    ratio: float | None
    """How many times worse it is; below 1: better. Corrected for the speed of the cores where it is a time or rate."""
    change: Change


def compare_results(
    known: list[Benchmark], before: Mapping[str, Result], now: Mapping[str, Result], tolerance: float
) -> Iterator[Comparison]:
    """Figures of ours whose unit, or bar, says which way is worse; of benchmarks that are in both runs.

    Args:
        tolerance: the ratio up to which a figure counts as the same.
    """
    bars = {(benchmark.name, bar.name): bar for benchmark in known for bar in benchmark.bars}
    for name, old in before.items():
        new = now.get(name)
        if new is None or new.size is not old.size:
            continue
        pace = new.pace / old.pace
        found = {figure.name: figure for figure in new.figures if not figure.of}
        for figure in old.figures:
            bar = bars.get((name, figure.name))
            grows = bar.at_least is not None if bar is not None else _find_direction(figure.unit)
            if figure.of or grows is None:
                continue
            other = found.get(figure.name)
            if other is None:
                yield Comparison(name, figure.name, figure.unit, figure.value, None, None, Change.MISSING)
                continue
            ratio = _find_ratio(figure, other, grows, pace)
            change = Change.WORSE if ratio > tolerance else Change.BETTER if ratio < 1 / tolerance else Change.SAME
            yield Comparison(name, figure.name, figure.unit, figure.value, other.value, ratio, change)


def _find_direction(unit: str) -> bool | None:
    """Whether more is better; None where the unit does not say."""
    if unit.endswith(RATES) or unit == "times":
        return True
    return False if unit in TIMES or unit in SIZES else None


def _find_ratio(old: Figure, new: Figure, more_is_better: bool, pace: float) -> float:
    least = LEAST.get(old.unit, 1e-9)
    before, now = max(old.value, least), correct_time(max(new.value, least), old.unit, pace)
    return before / now if more_is_better else now / before


def make_baseline(known: list[Benchmark], results: Mapping[str, Result], path: Path) -> None:
    """Write results to be compared with later: without the name of the CPU, and without what is left out."""

    def strip(result: Result) -> Result:
        hardware: dict[str, Any] = {**result.hardware, "cpu": ""}
        return replace(result, hardware=hardware)

    kept = {name: strip(result) for name, result in results.items() if result.figures}
    write_summary(path, [one for one in known if one.name in kept], kept)
