"""Time of 30 seeds of seven arms of the lab."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lab.comparison import Comparison
from benchmarks.lab.runs import Registry, run_all
from benchmarks.runner.figures import Bar, Figure, make_parser, run_benchmark

BARS = (Bar("30 seeds × 7 arms, two processes", "min", at_most=15.0),)
FILE = Path(__file__).parent / "lab" / "fresh_03.yaml"
ARMS, SEEDS, JOBS = 7, 30, 2
MEASURED = {"quick": 2, "standard": 6, "full": SEEDS}
"""Seeds that are run at each size; the figure is for all."""


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Time of the runs of one comparison, with the start of the processes and without the levels."""
    seeds = MEASURED[options.size.value]
    plain = Comparison.read(FILE).to_mapping()
    arms = dict(list(plain["arms"].items())[:ARMS])
    comparison = Comparison.of({**plain, "arms": arms, "compare": [], "rates": [0.002], "seeds": seeds})
    registry = Registry(comparison, options.work / f"runs-{time.time_ns()}")
    moments: list[float] = []
    start = time.perf_counter()
    # The levels and the first policy are made before the first run begins, once for all comparisons.
    run_all(registry, JOBS, lambda: moments.append(time.perf_counter()))
    runs = len(moments)
    first = moments[0] - start
    pace = (moments[-1] - moments[0]) / (runs - 1)
    yield Figure("levels, first policy, first run", first, "s", note="levels are kept for the next comparison")
    yield Figure("one run, two at a time", pace, "s", note=f"{runs} runs, {comparison.training.budget:,} tokens each")
    yield Figure(BARS[0].name, pace * ARMS * SEEDS / 60, "min", note=f"from {runs} runs")


def main() -> int:
    """Do what the command line asks for; exit code 1 if the bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, packages=("torch", "numpy"))


if __name__ == "__main__":
    sys.exit(main())
