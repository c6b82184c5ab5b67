"""Rollouts while processes of their services are killed.

64 episodes at a time, half of them of CodeInterpreter, half of SearchR1, played by a script. Each is played in the calm
first; under siege every episode must have the same words and the same reward, or end as a fault and be played again.
Without --quick it lasts five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

from benchmarks.parts.siege import run_siege
from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, run_benchmark

BARS = (
    Bar("episodes lost", "", at_most=0),
    Bar("wrong rewards", "", at_most=0),
    Bar("episodes at a time", "", at_least=64),
)
SECONDS = {Size.QUICK: 60, Size.STANDARD: 300, Size.FULL: 1800}


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Besiege."""
    try:
        report = run_siege(seconds=SECONDS[options.size])
    except asyncio.TimeoutError as error:
        raise LeftOut("the sandbox does not start here: see spear sandbox doctor") from error
    yield Figure("episodes at a time", report.most_held)
    yield Figure("length of the siege", report.seconds, "s")
    yield Figure("episodes played to their end", report.episodes, note=f"{report.calls:,} programs and searches")
    yield Figure("episodes per second", report.episodes / report.seconds, "1/s")
    injuries = ", ".join(f"{name} {count}" for name, count in sorted(report.injuries.items()))
    yield Figure("processes killed", sum(report.injuries.values()), note=injuries)
    faults = ", ".join(f"{name} {count}" for name, count in sorted(report.faults.items()))
    yield Figure("episodes played again after a fault", sum(report.faults.values()), note=faults)
    yield Figure("slowest episode, all tries", report.slowest_s, "s")
    yield Figure("episodes lost", len(report.lost), note="; ".join(report.lost[:3]))
    yield Figure("wrong rewards", len(report.wrong), note="; ".join(report.wrong[:1])[:300])


def main() -> int:
    """Measure and report."""
    options = make_parser(__doc__).parse_args()
    return run_benchmark(measure, options, BARS, packages=("spear-envs", "httpx", "uvicorn"))


if __name__ == "__main__":
    raise SystemExit(main())
