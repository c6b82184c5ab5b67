"""``make demo`` after its set-up: minutes and gain."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, run_benchmark
from spear_training.demo import RESULTS, run_demo

BARS = (
    Bar("make demo", "min", at_most=5.0, size="standard"),
    Bar("median training step", "s", at_most=4.0, size="standard"),
    Bar("gain on the test panel, T = 1, paired", "points", at_least=15.0, size="standard"),
    Bar("gain on the test panel, T = 0.4, paired", "points", at_least=8.0, size="standard"),
    Bar("distance of the two 95 % intervals, T = 1", "points", at_least=0.0, size="standard"),
)
STEPS = 60


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """The demo as it is; it resumes with ``--work``, and its minutes are not measured then."""
    if options.size is Size.QUICK:
        raise LeftOut("it takes six minutes of a quiet machine, and fewer steps say nothing: run it without --quick")
    folder, start = options.work / "demo", time.monotonic()
    whole = not folder.exists()
    run_demo(folder, steps=STEPS, seed=0, console=Console(stderr=True))
    minutes = (time.monotonic() - start) / 60
    results = json.loads((folder / RESULTS).read_text("utf-8"))
    if whole:
        yield Figure("make demo", minutes, "min", note="by the clock")
    yield Figure("median training step", results["step_seconds_median"], "s", note=f"{STEPS} steps, some with a replay")
    for temperature, row in results["comparison"].items():
        before, after, difference = row["before"], row["after"], row["difference"]
        name = f"T = {float(temperature):g}"
        yield Figure(f"success before, {name}", 100 * before["mean"], "%")
        yield Figure(f"success after, {name}", 100 * after["mean"], "%")
        yield Figure(f"gain on the test panel, {name}, paired", 100 * difference["mean"], "points")
        distance = 100 * (after["ci95_low"] - before["ci95_high"])
        yield Figure(f"distance of the two 95 % intervals, {name}", distance, "points")


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("torch", "verl", "transformers"))


if __name__ == "__main__":
    sys.exit(main())
