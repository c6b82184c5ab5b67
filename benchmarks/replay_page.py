"""The page of recorded episodes: how long 2,000 of them take to write, to index and to open in headless Chromium.

The episodes are Sokoban's, played by the random policy in full prompts, each turn with its picture. Opening is wall
time, since that is what a person waits; everything else is CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from agents.evaluate import run_evaluation
from agents.replay.page import export_page
from agents.replay.runs import Run
from agents.replay.server import PageServer
from agents.settings import EngineKind, EvalSettings
from benchmarks._figures import Figure, describe_run, measure_cpu, print_figures, write_figures
from tests.agents.replay.chromium import PROGRAM, Chromium

READY_SECONDS = 2.0
REPEATS = 5


def measure_page(episodes: int, folder: Path) -> Iterator[Figure]:
    """Figures of a page of so many episodes, in their order."""
    settings = EvalSettings(
        "spear/Sokoban-v0", EngineKind.RANDOM, split="train", tasks=str(episodes), template="default"
    )
    run_evaluation(settings, folder / "run")
    yield Figure("episodes.jsonl", (folder / "run" / "episodes.jsonl").stat().st_size / 1e6, "MB")
    runs: list[Run] = []
    yield Figure("reading the list", measure_cpu(lambda: runs.append(Run(folder / "run"))), "s CPU")
    run = runs[0]
    yield Figure("pictures", float(sum(row["turns"] + 1 for row in run.rows())), "")
    page = folder / "page.html"
    yield Figure("writing the file", measure_cpu(lambda: export_page(run, page)), "s CPU")
    yield Figure("its size", page.stat().st_size / 1e6, "MB")
    with Chromium(folder / "profile") as browser, PageServer(run, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, address in (("the file", page.as_uri()), ("the served page", server.address)):
            seconds = [browser.open(address) for _ in range(1 + REPEATS)]
            yield Figure(f"opening {name}, first time", seconds[0], "s", READY_SECONDS)
            yield Figure(
                f"opening {name}, median of {REPEATS} more", statistics.median(seconds[1:]), "s", READY_SECONDS
            )
        rows = browser.evaluate("document.querySelectorAll('.row').length")
        yield Figure("rows in the document", float(rows), "", 60)
        server.shutdown()


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    if PROGRAM is None:
        print("No measurement: there is no Chromium on this machine (apt install chromium).")
        return 0
    print(describe_run("spear-envs", "pillow"))
    with tempfile.TemporaryDirectory() as folder:
        figures = print_figures(measure_page(options.episodes, Path(folder)))
    if options.json is not None:
        write_figures(figures, options.json)
    return 0 if all(figure.held for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
