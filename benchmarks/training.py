"""What SPEAR costs a training step through verl on a CPU: time, memory and work on the driver, beside GRPO.

Four short trainings of the demo's policy from the same warm start with the same seed. Three of them learn at a rate of
0, so that all play the same episodes and differ in nothing but what is measured: GRPO's form (no replay), SPEAR whose
replay never fires (every row still goes through the buffer), and SPEAR that replays at each step what the last one
stored. The fourth is the demo. The first steps are left out.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from agents.metrics import read_history
from benchmarks._figures import Bar, Figure, Size, make_parser, run_benchmark
from training.runs import run_training
from training.supervise import MARK
from training.warmstart import WarmStartSettings, train_policy

BARS = (
    Bar("median step of the demo", "s", at_most=4.0),
    Bar("SPEAR's step over GRPO's, replay off", "times", at_most=1.10),
    Bar("SPEAR's step over GRPO's, n_SIL 0.5", "times", at_most=1.25),
    Bar("share of the replay's own passes in what is added", "", at_least=0.90),
    Bar("driver's share of a step, replay off", "", at_most=0.02),
    Bar("driver's share of a step, replay on", "", at_most=0.02),
    Bar("driver's share of a step, the demo", "", at_most=0.02),
    Bar("peak memory of SPEAR's step over GRPO's and the store", "times", at_most=1.02),
)
WARM_UP = 2
N_SIL = 0.5
"""Replay optimiser steps for each on-policy one at which SPEAR is held to its bar."""
STILL = ("actor_rollout_ref.actor.optim.lr=0",)


@dataclass
class Arm:
    """What one training measured: its steps after the warm-up, and the memory of its processes."""

    history: list[dict[str, Any]] = field(default_factory=list)
    peaks: dict[int, float] = field(default_factory=dict)
    """Most resident memory by process id, MB."""

    def list_values(self, name: str) -> list[float]:
        """A metric at each step, 0 where it is missing."""
        return [record.get(name) or 0.0 for record in self.history]

    def median(self, name: str) -> float:
        """Of a metric over the steps."""
        return statistics.median(self.list_values(name))

    def total(self, name: str) -> float:
        """Of a metric over the steps."""
        return sum(self.list_values(name))

    @property
    def peak(self) -> float:
        """Most resident memory of the processes, added up, MB."""
        return sum(self.peaks.values())

    @property
    def work(self) -> float:
        """Seconds of the steps without their rollouts."""
        return self.total("perf/step_seconds") - self.total("timing_s/gen")


@contextmanager
def watch_memory(peaks: dict[int, float], seconds: float = 1.0) -> Iterator[None]:
    """Note the most memory that the trainer and its workers have held; a process tells its own peak."""
    over = threading.Event()

    def look() -> None:
        own = psutil.Process().children(recursive=True)
        marks = {read_mark(process) for process in own} - {None}
        for process in psutil.process_iter():
            try:
                title = " ".join(process.cmdline())
                if read_mark(process) in marks and any(name in title for name in ("WorkerDict", "TaskRunner")):
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    peaks[process.pid] = next(int(line.split()[1]) for line in lines if line[:5] == "VmHWM") / 1024
            except (psutil.Error, OSError, StopIteration):
                continue

    def keep_looking() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def read_mark(process: psutil.Process) -> str | None:
    """What the processes of one training have in common; None for others."""
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def train(policy: Path, out: Path, steps: int, *overrides: str) -> Arm:
    """Train for ``steps`` steps and measure those after the warm-up."""
    common = (
        f"actor_rollout_ref.model.path={policy}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    )
    arm = Arm()
    with watch_memory(arm.peaks):
        run_training(("preset=demo", *common, *overrides), out, Console(stderr=True))
    arm.history = [record for record in read_history(out) if record["step"] > WARM_UP]
    return arm


def compare(grpo: Arm, idle: Arm, spear: Arm, demo: Arm) -> Iterator[Figure]:
    """The figures of all arms.

    Rollouts are left out of the differences: they are the same in all arms, but not equally fast.
    """
    yield Figure("median step of the demo", demo.median("perf/step_seconds"), "s")
    yield Figure("GRPO's step, mean", grpo.total("perf/step_seconds") / len(grpo.history), "s")
    yield Figure("GRPO's step without its rollouts, mean", grpo.work / len(grpo.history), "s")
    steps, added = grpo.total("perf/step_seconds"), spear.work - grpo.work
    yield Figure("SPEAR's step over GRPO's, replay off", 1 + (idle.work - grpo.work) / steps, "times")
    n_sil = statistics.mean(spear.list_values("replay/n_sil"))
    note = f"{n_sil:.2f} replay steps for each on-policy one, {spear.median('replay/drawn'):.0f} rows drawn a step"
    yield Figure("SPEAR's step over GRPO's, replay on", 1 + added / steps, "times", note=note)
    yield Figure(
        "SPEAR's step over GRPO's, n_SIL 0.5", 1 + added / steps * N_SIL / n_sil, "times", note="in proportion"
    )
    own = spear.total("timing_s/train_replayed_rows")
    yield Figure("share of the replay's own passes in what is added", own / added)
    for name, arm in (("replay off", idle), ("replay on", spear), ("the demo", demo)):
        yield Figure(f"driver's share of a step, {name}", arm.median("perf/spear_driver_share"))
    store = max(spear.list_values("replay/bytes")) / 1e6
    yield Figure("peak memory of GRPO's step, trainer and worker", grpo.peak, "MB")
    yield Figure("peak memory of SPEAR's step, replay off", idle.peak, "MB")
    yield Figure("peak memory of SPEAR's step, replay on", spear.peak, "MB", note=f"of it the store {store:.2f} MB")
    yield Figure("peak memory of SPEAR's step over GRPO's and the store", spear.peak / (grpo.peak + store), "times")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """Warm start, four trainings, figures."""
    folder: Path = options.work
    steps = options.steps or (WARM_UP + 4 if options.size is Size.QUICK else WARM_UP + 12)
    policy = options.policy or folder / "warmstart"
    if not policy.exists():
        train_policy(WarmStartSettings("spear/Sokoban-v0", env_kwargs={"modality": "text"}, panel_tasks=0), policy)
    grpo = train(policy, folder / "grpo", steps, "spear.sil.enabled=false", *STILL)
    idle = train(policy, folder / "idle", steps, "spear.replay.capacity=1000000", *STILL)
    stored = int(idle.median("replay/kept"))
    spear = train(policy, folder / "spear", steps, f"spear.replay.capacity={stored}", *STILL)
    demo = train(policy, folder / "demo", steps)
    if not grpo.list_values("rows/trained") == idle.list_values("rows/trained") == spear.list_values("rows/trained"):
        raise SystemExit("the arms did not play the same episodes: their times cannot be compared")
    yield from compare(grpo, idle, spear, demo)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help="steps of each training (default 14; --quick 6)")
    parser.add_argument("--policy", type=Path, help="warm-started folder; made if not given")
    return run_benchmark(measure, parser.parse_args(), BARS, ("verl", "torch", "ray"))


if __name__ == "__main__":
    raise SystemExit(main())
