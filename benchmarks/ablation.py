"""The paper's ablation at the size of two cores: GRPO, self-imitation, intrinsic reward, Dr.BoT and GiGPO side by side.

Every run is a `spear train` of its own, through verl. `run` does what is missing, until all is done or its time is
over, and can be stopped at any moment: the same command goes on. Started twice on the same folder, the two share the
work.

    python -m benchmarks.ablation run --out runs/ablation --hours 2
    python -m benchmarks.ablation status --out runs/ablation
    python -m benchmarks.ablation report

Recorded results are small JSON files beside this one; `report` (also without a word) makes tables and pictures of them.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._ablation_plan import SCENARIOS
from benchmarks._ablation_report import print_report, write_report
from benchmarks._ablation_run import Ablation

RESULTS = Path(__file__).parent / "results" / "ablation"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run, show the state, or report; exit code 1 where a run failed, 3 where something is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("run", "status", "report"), default="report")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="run folders (default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="recorded results (default: beside this file)")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--hours", type=float, default=2.0, help="of one call of run (default %(default)s)")
    parser.add_argument("--docs", type=Path, help="report: page whose marked tables are replaced, and its images/")
    options = parser.parse_args()
    chosen = [SCENARIOS[name] for name in options.scenario or SCENARIOS]
    console = Console(soft_wrap=True)
    if options.command == "report":
        if options.docs is None:
            print_report(chosen, options.results, console)
        else:
            write_report(chosen, options.results, options.docs)
        return 0
    ablation = Ablation(options.out, options.results, chosen, console)
    if options.command == "run":
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            ablation.run(options.hours * 3600)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on")
    ablation.show()
    return 1 if ablation.failed else 0 if ablation.finished else 3


if __name__ == "__main__":
    raise SystemExit(main())
