"""SPEAR's training step next to GRPO's: time and memory.

One training of the demo's policy in which GRPO's steps (no replay), SPEAR's whose replay never fires (every row still
goes through the buffer) and SPEAR's that replay take turns, all on the same episodes; see ``parts/training_arms.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_agents.evaluation.records import read_history
from spear_training.algorithms import RowTable
from spear_training.run.compose import compose
from spear_training.run.launch import prepare_run, prepare_training
from spear_training.run.supervise import supervise_training
from spear_training.step.minibatches import deal_rows
from spear_training.warmstart import WarmStartSettings, train_policy

BARS = (
    Bar("SPEAR's step over GRPO's, replay off", "times", at_most=1.05),
    Bar("SPEAR's step over GRPO's, n_SIL 0.5", "times", at_most=1.15),
    Bar("share of the replay's own passes in what is added", at_least=0.90),
    Bar("driver's share of a step, replay off", at_most=0.01),
    Bar("driver's share of a step, replay on", at_most=0.008),
    Bar("peak memory of SPEAR's steps over GRPO's and the store", "times", at_most=1.02),
    Bar("columns of 2,048 rows of 6,000 tokens", "s", at_most=0.2),
    Bar("tokens of the slowest rank over the mean, mathematics", "times", at_most=1.05),
    Bar("tokens of the slowest rank over the mean, ALFWorld", "times", at_most=1.05),
    Bar("tokens of the slowest rank over the mean, WebShop", "times", at_most=1.05),
)
MIXES = {
    "mathematics": (512, 8, lambda random, rows: random.normal(4000, 1500, rows).clip(500, 16000)),
    "ALFWorld": (1024, 8, lambda random, rows: random.normal(900, 250, rows).clip(100, 2500)),
    "WebShop": (256, 4, lambda random, rows: random.lognormal(6.8, 0.8, rows)),
}
"""Simulated mini-batches: rows, ranks that share them, and lengths in tokens."""
OWN = "benchmarks.parts.training_arms"
"""The training's process."""
NAME = "arms"
SETTLE = 24
"""Steps of GRPO at the beginning: its peak of memory creeps up by 4 % until the eighteenth."""
N_SIL = 0.5
"""Replayed rows for each on-policy one at which SPEAR is held to its bar."""
CYCLES = {Size.QUICK: 4, Size.STANDARD: 11, Size.FULL: 31}
"""Steps of each arm; the first is left out, for nothing is stored yet."""


class Arm(Enum):
    """Trainer that makes a step."""

    GRPO = "GRPO"
    """No replay."""
    IDLE = "replay off"
    """Every row goes through the buffer, which never fills."""
    SPEAR = "replay on"
    """Each of its steps replays what the one before has stored."""


def choose_arm(step: int) -> Arm:
    """The arm of a step, counted from 1."""
    return Arm.GRPO if step <= SETTLE else tuple(Arm)[(step - SETTLE - 1) % len(Arm)]


@dataclass
class Steps:
    """The steps of one arm."""

    records: list[dict[str, Any]]

    def list_values(self, name: str) -> list[float]:
        """A metric at each step, 0 where it is missing."""
        return [record.get(name) or 0.0 for record in self.records]

    def median(self, name: str) -> float:
        """Return the median of a metric over the steps."""
        return statistics.median(self.list_values(name))

    @property
    def work(self) -> float:
        """Median seconds of a step without its rollouts, which are the same in all arms but not equally fast."""
        pairs = zip(self.list_values("perf/step_seconds"), self.list_values("timing_s/gen"), strict=True)
        return statistics.median(step - rollouts for step, rollouts in pairs)


def train(policy: Path, out: Path, steps: int) -> list[dict[str, Any]]:
    """Train for ``steps`` steps; their metrics."""
    words = (
        "preset=demo",
        f"model.path={policy}",
        "optimizer.lr=0",
        "reward.mu=none",  # else the same episodes would earn less from step to step
        f"train.steps={steps}",
        "validation.at_start=false",
        "validation.every=null",
        "checkpoint.every=null",
        f"verl.trainer.v1.trainer_mode={NAME}",
    )
    prepare_run(prepare_training(compose(words), out), out)
    supervise_training(out, "cpu", lambda history: None, module=OWN)
    return [record for record in read_history(out) if "training/global_step" in record]


def compare(history: list[dict[str, Any]]) -> Iterator[Figure]:
    """The figures of a training's steps."""
    first = SETTLE + len(Arm)
    grpo, idle, spear = (
        Steps([record for record in history if record["step"] > first and choose_arm(record["step"]) is arm])
        for arm in Arm
    )
    step, added = grpo.median("perf/step_seconds"), spear.work - grpo.work
    yield Figure("GRPO's step", step, "s")
    yield Figure("GRPO's step without its rollouts", grpo.work, "s")
    yield Figure("SPEAR's step over GRPO's, replay off", 1 + (idle.work - grpo.work) / step, "times")
    n_sil = statistics.mean(spear.list_values("replay/n_sil"))
    rows = f"{spear.median('replay/drawn'):.0f} rows replayed beside {spear.median('rows/trained'):.0f}"
    yield Figure("SPEAR's step over GRPO's, replay on", 1 + added / step, "times", note=f"n_SIL {n_sil:.2f}, {rows}")
    ratio = 1 + added / step * N_SIL / n_sil
    yield Figure("SPEAR's step over GRPO's, n_SIL 0.5", ratio, "times", note="what is added, in proportion")
    own = spear.median("timing_s/train_rows") - grpo.median("timing_s/train_rows")
    yield Figure("share of the replay's own passes in what is added", own / added, note=f"{own:.3g} of {added:.3g} s")
    for arm, steps in ((Arm.IDLE, idle), (Arm.SPEAR, spear)):
        yield Figure(f"driver's share of a step, {arm.value}", steps.median("perf/spear_driver_share"))
    store = max(idle.list_values("replay/bytes")) / 1e6
    before, after = history[SETTLE - 1]["benchmark/peak_mb"], history[-1]["benchmark/peak_mb"]
    yield Figure("peak memory of GRPO's steps, trainer and worker", before, "MB")
    note = f"{after - before:.1f} MB more, the store {store:.1f} MB"
    yield Figure("peak memory of SPEAR's steps over GRPO's and the store", after / (before + store), "times", note=note)


def measure_columns(rows: int = 2048, prompt: int = 1000, response: int = 5000) -> Iterator[Figure]:
    """Time of putting a step's rows into the queue's shape, the best of three."""
    from spear_training.verl_plugin.queue import build_columns  # imports verl, which asks for a device

    random = np.random.default_rng(0)
    table = RowTable(
        prompt_length=[prompt] * rows,
        response_length=[response] * rows,
        ids=random.integers(150_000, size=rows * (prompt + response), dtype=np.int32),
        mask=np.ones(rows * response, dtype=bool),
        rollout_log_probs=np.zeros(rows * response, dtype=np.float32),
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        build_columns(table)
        seconds.append(time.perf_counter() - start)
    yield Figure("columns of 2,048 rows of 6,000 tokens", min(seconds), "s")


def measure_balance(draws: int = 20) -> Iterator[Figure]:
    """How evenly ranks share simulated mini-batches, and how evenly they would by chance."""
    for mix, (rows, ranks, draw) in MIXES.items():
        found: dict[bool, list[float]] = {True: [], False: []}
        for seed in range(draws):
            random = np.random.default_rng(seed)
            lengths = draw(random, rows).astype(np.int64)
            for balance, ratios in found.items():
                deal = deal_rows([range(rows)], lengths, count=1, shares=ranks, rng=random, balance=balance)
                ratios.append(deal.measure_balance(lengths, ranks))
        note = f"{max(found[True]):.3f} at worst; dealt at random {statistics.mean(found[False]):.3f}"
        yield Figure(
            f"tokens of the slowest rank over the mean, {mix}", statistics.mean(found[True]), "times", note=note
        )


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Rows, warm start, training, figures."""
    yield from measure_columns()
    yield from measure_balance()
    folder: Path = options.work
    policy = options.policy or folder / "warmstart"
    if not policy.exists():
        train_policy(WarmStartSettings("spear/Sokoban-v1", env_kwargs={"modality": "text"}, panel_tasks=0), policy)
    yield from compare(train(policy, folder / "run", SETTLE + len(Arm) * CYCLES[options.size]))


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--policy", type=Path, help="warm-started folder; made if not given")
    return run_benchmark(measure, parser.parse_args(), BARS, ("verl", "torch", "ray"))


if __name__ == "__main__":
    raise SystemExit(main())
