"""The paper's ablation at the size of two cores.

Every run is a `spear train` of its own, through verl. `run` does what is missing, until all is done or its time is
over, and can be stopped at any moment: the same command resumes. Started twice on the same folder, the two share the
work.

    python -m benchmarks.ablation run --out runs/ablation --hours 2
    python -m benchmarks.ablation status --out runs/ablation
    python -m benchmarks.ablation report --docs docs/results.md

Recorded results are small JSON files beside this one; `report` makes tables and pictures of them. Without a word the
figures are held to their bar.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.ablations.plan import ARMS, BASES, SCENARIOS, Scenario
from benchmarks.ablations.report import print_report, write_report
from benchmarks.ablations.results import compare_arms, read_arms
from benchmarks.ablations.run import WARM_START, Ablation, read_result
from benchmarks.runner.figures import Bar, Figure, LeftOut, make_parser, run_benchmark
from spear_agents.comparison.statistics import estimate_mean

RESULTS = Path(__file__).parent / "results" / "ablation"
BARS = (Bar("environments on which SPEAR beats GRPO, interval over seeds and tasks above 0", "", at_least=2.0),)
BEST, PLAIN = "grpo_spear", "grpo"


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the success of each arm on the test panel, and how far it is above the arm without SPEAR."""
    beaten, compared = 0, 0
    for scenario in _choose(options):
        start, arms = read_result(options.results, scenario, WARM_START), read_arms(scenario, options.results)
        if start is None or not arms:
            continue
        panel = start["test_panel"]
        name = scenario.name
        note = f"{len(panel['won'])} tasks × {panel['samples']} samples"
        success = estimate_mean(list(panel["won"].values()))
        yield Figure(f"{name}: warm start", 100 * success.mean, "%", note=f"± {100 * success.half:.1f}, {note}")
        for arm in arms:
            success, seeds = arm.success, f"{len(arm.runs)} of {len(scenario.seeds)} seeds"
            title = f"{name}: {ARMS[arm.arm]}"
            yield Figure(title, 100 * success.mean, "%", note=f"± {100 * success.half:.1f}, {seeds}")
            paired = compare_arms(arms, arm)
            if paired is None:
                continue
            difference, alone = paired.difference, paired.tasks_alone
            yield Figure(
                f"{title}, over {ARMS[paired.base.arm]}",
                100 * difference.mean,
                "points",
                note=f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f} over {len(paired.seeds)} seeds and"
                f" tasks; {100 * alone.low:+.1f} to {100 * alone.high:+.1f} over tasks alone",
            )
            if (arm.arm, BASES[arm.arm]) == (BEST, PLAIN):
                compared += 1
                beaten += difference.low > 0
    if not compared:
        raise LeftOut("no result of both arms is recorded: python -m benchmarks.ablation run")
    yield Figure(BARS[0].name, beaten, "", note=f"of {compared}; paired by seed and task")


def _choose(options: argparse.Namespace) -> Sequence[Scenario]:
    return [SCENARIOS[name] for name in options.scenario or SCENARIOS]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run(options: argparse.Namespace, console: Console) -> int:
    """Run what is missing, or only show the state; exit code 1 where a run failed, 3 where something is left to do."""
    scenarios = [scenario for scenario in _choose(options) if not scenario.closed]
    ablation = Ablation(options.out, options.results, scenarios, console)
    if options.command == "run":
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            ablation.run(options.hours * 3600)
        except KeyboardInterrupt:
            console.print("stopped; the same command resumes")
    ablation.show()
    return 1 if ablation.failed else 0 if ablation.finished else 3


def main() -> int:
    """Do what the command line asks for."""
    parser = make_parser(__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "status", "report"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="run folders (default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="recorded results (default: beside this file)")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--hours", type=float, default=2.0, help="of one call of run (default %(default)s)")
    parser.add_argument("--docs", type=Path, help="report: page whose marked tables are replaced, and its images/")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    if options.command in ("run", "status"):
        return run(options, console)
    if options.command is None:
        return run_benchmark(measure, options, BARS, packages=("verl", "torch"))
    if options.docs is None:
        print_report(_choose(options), options.results, console)
    else:
        write_report(_choose(options), options.results, options.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
