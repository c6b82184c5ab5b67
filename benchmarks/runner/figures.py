"""The contract of a benchmark: figures, the bars that they are held to, and how a script measures and reports them.

A script has a docstring whose first line says what it measures, a literal tuple ``BARS``, and a ``main`` that hands a
generator of figures to :func:`run_benchmark`. ``spear bench`` reads the first two off the syntax tree, without
importing what the script needs, and runs the script in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from spear_envs.data.files import write_json

TIMES = ("s", "ms", "us", "min", "s CPU", "ms CPU", "min CPU", "CPU s", "CPU ms", "CPU min", "CPU-min", "s/step")
RATES = ("/s", "per CPU-second")
"""Ends of the units of rates."""
REFERENCE_S = 0.0256
"""CPU seconds of the fixed piece of work (:func:`time_calibration`) on the core for which bars of time are."""

__all__ = [
    "RATES",
    "REFERENCE_S",
    "TIMES",
    "Bar",
    "Figure",
    "LeftOut",
    "Size",
    "Status",
    "correct_time",
    "describe_hardware",
    "find_bar",
    "find_pace",
    "format_value",
    "make_parser",
    "measure_cpu",
    "print_figures",
    "read_versions",
    "run_benchmark",
    "time_calibration",
]


class Size(str, Enum):
    """How much is measured."""

    QUICK = "quick"
    """A few minutes at most: few repetitions, small inputs."""
    STANDARD = "standard"
    """Size of the figures in the docs."""
    FULL = "full"
    """Everything, hours of it included."""


class Status(str, Enum):
    """How far a benchmark has come."""

    RUNNING = "running"
    """Begun; where no process works on it, it failed or was interrupted."""
    FINISHED = "finished"
    """All its figures are there."""
    LEFT_OUT = "left out"
    """It cannot be measured here, and says why."""


class LeftOut(Exception):
    """Raised where something that a benchmark needs is missing; the message says how to get it."""


@dataclass(frozen=True)
class Bar:
    """Bound of a figure: at most, or at least, a constant. One of a time or rate is for the reference core."""

    name: str
    """The figure's name."""
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    size: str = Size.QUICK.value
    """The smallest size at which the figure is measured."""

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"the bar of {self.name!r} is either at_most or at_least")
        Size(self.size)

    def applies_to(self, size: Size) -> bool:
        """Whether a run of this size measures enough for the bar."""
        return list(Size).index(Size(self.size)) <= list(Size).index(size)

    def holds(self, value: float, pace: float = 1.0) -> bool:
        """Whether a figure of this value holds the bar, on a core of this :func:`find_pace`; NaN does not."""
        value = correct_time(value, self.unit, pace)
        return bool(value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0))

    @property
    def limit(self) -> float:
        """The constant."""
        return self.at_most if self.at_most is not None else (self.at_least or 0.0)

    def __str__(self) -> str:
        sign = "≤" if self.at_most is not None else "≥"
        return f"{sign} {self.limit:,.10g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Figure:
    """One measurement. The name is the same in every run: bars, peers and a baseline are found by it."""

    name: str
    value: float
    unit: str = ""
    of: str = ""
    """Peer that the figure is of; empty: ours. A peer's figure has the name of ours."""
    note: str = ""
    """Details that vary from run to run: counts, lengths."""


Measure = Callable[[argparse.Namespace], Iterable[Figure]]
"""Gives the figures as they come. Of the options, ``size`` and ``work`` (a folder) are always there."""


def measure_cpu(run: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def time_calibration() -> float:
    """CPU seconds of a fixed piece of work, half of it Python and half NumPy: how fast this core is now."""
    matrix = np.random.default_rng(0).random((160, 160))

    def work() -> None:
        total = 0
        for number in range(400_000):
            total += number % 7
        for _ in range(60):
            matrix @ matrix

    def measure() -> float:
        start = time.thread_time()  # not of further threads of NumPy's, which mostly wait
        work()
        return time.thread_time() - start

    return min(measure() for _ in range(5))


def find_pace(calibration: Sequence[float]) -> float:
    """How many times as long as the reference core this one takes for the fixed piece of work."""
    return fmean(calibration) / REFERENCE_S


def correct_time(value: float, unit: str, pace: float) -> float:
    """A time or rate as the reference core would have it; values of other units stay as they are."""
    if unit in TIMES:
        return value / pace
    return value * pace if unit.endswith(RATES) else value


def read_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages; "not installed" where one is not."""
    found = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def describe_hardware() -> dict[str, Any]:
    """Cores, architecture, memory in GB and the CPU's name."""
    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "machine": platform.machine(), "memory_gb": round(memory / 1e9), "cpu": cpu}


def format_value(value: float) -> str:
    """Four digits, or thousands."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def find_bar(figure: Figure, bars: Iterable[Bar]) -> Bar | None:
    """The bar of a figure of ours."""
    return next((bar for bar in bars if bar.name == figure.name), None) if not figure.of else None


def print_figures(figures: Iterable[Figure], bars: Sequence[Bar], pace: float) -> Iterator[Figure]:
    """Print each figure as it comes, with its bar and verdict on a core of this pace, and pass it on."""
    for figure in figures:
        bar = find_bar(figure, bars)
        if bar is not None and bar.unit != figure.unit:
            raise ValueError(f"{figure.name!r} is measured in {figure.unit!r}, its bar is in {bar.unit!r}")
        verdict = "" if bar is None else f"  bar {bar}  {'held' if bar.holds(figure.value, pace) else 'NOT HELD'}"
        whose = f" [{figure.of}]" if figure.of else ""
        note = f"  ({figure.note})" if figure.note else ""
        print(f"{figure.name + whose:72} {format_value(figure.value):>10} {figure.unit:9}{verdict}{note}", flush=True)
        yield figure


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    for size, help in ((Size.QUICK, "minutes: fewer rounds, less of everything"), (Size.FULL, "everything, hours")):
        sizes.add_argument(f"--{size.value}", dest="size", action="store_const", const=size, help=help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as they come")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep what is built here (default: thrown away)")
    parser.set_defaults(size=Size.STANDARD)
    return parser


def run_benchmark(
    measure: Measure, options: argparse.Namespace, bars: Sequence[Bar], packages: Sequence[str] = ()
) -> int:
    """Measure, print and write; exit code 1 if a bar does not hold.

    Args:
        measure: gives the figures; raises :class:`LeftOut` if what it needs is not here.
        options: of :func:`make_parser`.
        bars: the script's.
        packages: distributions whose versions matter.
    """
    versions = read_versions(packages)
    print("; ".join(f"{name} {found}" for name, found in versions.items()), flush=True)
    report = _Report(options, versions)
    pace, held = report.pace, True
    print(f"pace {pace:.2f}: a fixed task takes as many times {1e3 * REFERENCE_S:.1f} ms, which bars of time allow for")
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        options.work.mkdir(parents=True, exist_ok=True)
        try:
            applying = [bar for bar in bars if bar.applies_to(options.size)]
            for figure in print_figures(measure(options), applying, pace):
                bar = find_bar(figure, applying)
                held &= bar is None or bar.holds(figure.value, pace)
                report.add(figure)
        except LeftOut as error:
            print(f"left out: {error}", flush=True)
            report.end(Status.LEFT_OUT, str(error))
            return 0
    report.end(Status.FINISHED)
    return 0 if held else 1


class _Report:
    """The JSON file of one benchmark, whole at every moment."""

    def __init__(self, options: argparse.Namespace, versions: dict[str, str]) -> None:
        self._path: Path | None = options.json
        self._start = time.perf_counter()
        self._report: dict[str, Any] = {
            "benchmark": Path(sys.argv[0]).stem,
            "size": options.size.value,
            "status": Status.RUNNING.value,
            "reason": "",
            "date": time.strftime("%Y-%m-%d"),
            "hardware": describe_hardware(),
            "versions": versions,
            "load": [os.getloadavg()[0]],
            "calibration": [time_calibration()],
            "figures": [],
        }
        self._write()

    @property
    def pace(self) -> float:
        """Pace of the core so far."""
        return find_pace(self._report["calibration"])

    def add(self, figure: Figure) -> None:
        """One more figure."""
        self._report["figures"].append(asdict(figure))
        self._write()

    def end(self, status: Status, reason: str = "") -> None:
        """Nothing more will come."""
        self._report["load"].append(os.getloadavg()[0])
        self._report["calibration"].append(time_calibration())
        self._report |= {"status": status.value, "reason": reason}
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._report["seconds"] = time.perf_counter() - self._start
        self._report["cpu_seconds"] = time.process_time() + children.ru_utime + children.ru_stime
        write_json(self._path, self._report)
