"""Figures with bars: how the parts of a benchmark hand them over, and how they are printed."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["Figure", "describe_run", "measure_cpu", "print_figures", "write_figures"]


@dataclass(frozen=True)
class Figure:
    """One measurement; ``bar`` is None where there is none to hold."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    """Whether the bar is a least value instead of a greatest."""

    @property
    def held(self) -> bool:
        """Whether the bar holds."""
        return self.bar is None or (self.value >= self.bar if self.at_least else self.value <= self.bar)


def measure_cpu(run: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def describe_run(*packages: str) -> str:
    """Versions of the packages that are installed, of Python, the CPU, and the date."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    known = []
    for package in packages:
        try:
            known.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            known.append(f"{package} not installed")
    return "; ".join([", ".join(known), f"Python {platform.python_version()}", cpu, str(date.today())])


def print_figures(figures: Iterable[Figure]) -> list[Figure]:
    """Print each figure as it comes, with its bar; returns them all."""
    shown = []
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        bar = "" if figure.bar is None else f"  bar {sign} {figure.bar:,.10g} {figure.unit}"
        value = f"{figure.value:,.0f}" if figure.value >= 1_000 else f"{figure.value:.4g}"
        verdict = "" if figure.held else "  NOT HELD"
        print(f"{figure.name:66} {value:>10} {figure.unit:9}{bar}{verdict}", flush=True)
        shown.append(figure)
    return shown


def write_figures(figures: Iterable[Figure], path: Path) -> None:
    """Write the figures to a JSON file."""
    rows = [{**asdict(figure), "held": figure.held} for figure in figures]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
