"""Writing, indexing and opening a page of 2,000 episodes.

The episodes are Sokoban's, played by the random policy in full prompts, each turn with its picture. Opening is wall
time, since that is what a person waits; everything else is CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, measure_cpu, run_benchmark
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.viewer.runs import Run
from spear_agents.viewer.server import PageServer, export_page
from tests.agents.replay.chromium import PROGRAM, Chromium

BARS = (
    Bar("opening the file, first time", "s", at_most=2.0, size="standard"),
    Bar("opening the file, median of 5 more", "s", at_most=2.0, size="standard"),
    Bar("opening the served page, first time", "s", at_most=2.0, size="standard"),
    Bar("opening the served page, median of 5 more", "s", at_most=2.0, size="standard"),
    Bar("rows in the document", at_most=60),
)
EPISODES = {Size.QUICK: 500, Size.STANDARD: 2_000, Size.FULL: 2_000}
REPEATS = 5


def measure_page(episodes: int, folder: Path) -> Iterator[Figure]:
    """Figures of a page of so many episodes, in their order."""
    settings = EvalSettings(
        "spear/Sokoban-v1", EngineKind.RANDOM, split="train", tasks=str(episodes), template="default"
    )
    run_evaluation(settings, folder / "run")
    yield Figure("episodes.jsonl", (folder / "run" / "episodes.jsonl").stat().st_size / 1e6, "MB")
    runs: list[Run] = []
    yield Figure("reading the list", measure_cpu(lambda: runs.append(Run(folder / "run"))), "s CPU")
    run = runs[0]
    yield Figure("pictures", float(sum(row["turns"] + 1 for row in run.rows())), note=f"{episodes:,} episodes")
    page = (folder / "page.html").resolve()
    yield Figure("writing the file", measure_cpu(lambda: export_page(run, page)), "s CPU")
    yield Figure("its size", page.stat().st_size / 1e6, "MB")
    with Chromium(folder / "profile") as browser, PageServer(run, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, address in (("the file", page.as_uri()), ("the served page", server.address)):
            seconds = [browser.open(address) for _ in range(1 + REPEATS)]
            yield Figure(f"opening {name}, first time", seconds[0], "s")
            yield Figure(f"opening {name}, median of {REPEATS} more", statistics.median(seconds[1:]), "s")
        rows = browser.evaluate("document.querySelectorAll('.row').length")
        yield Figure("rows in the document", float(rows))
        server.shutdown()


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    if PROGRAM is None:
        raise LeftOut("there is no Chromium on this machine (apt install chromium)")
    yield from measure_page(EPISODES[options.size], options.work)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("spear-envs", "pillow"))


if __name__ == "__main__":
    sys.exit(main())
