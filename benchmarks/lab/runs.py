"""All runs of a comparison: shared data is made once, and each result is a file, so that a comparison resumes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import spear_training
from benchmarks.lab.comparison import TUNING_SEED, Comparison, LabComparison, Panel, RunPlan, TrainerComparison
from benchmarks.lab.policy import BoardPolicy, Examiner, clone_expert
from benchmarks.lab.rooms import Rooms
from benchmarks.lab.training import Training, train
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task
from spear_envs.data.files import draft_file, write_json, write_text
from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.tasks import make_task_set

if TYPE_CHECKING:
    from benchmarks.lab.trainer_runs import TrainerBench

DECIDING = ("actor", "controls", "playing", "policy", "rooms", "training", "tree")
"""Modules of this folder that affect runs, besides the trainer's ``algorithms`` and ``step``."""
REGISTERED, RESULT = "registered.json", "result.json"


def digest_code() -> str:
    """SHA-256 over the modules that affect runs."""
    here, trainer = Path(__file__).parent, Path(spear_training.__file__).parent
    files = [*trainer.glob("algorithms/*.py"), *trainer.glob("step/*.py"), *(here / f"{name}.py" for name in DECIDING)]
    files.sort()
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


@lru_cache(maxsize=4)
def load_rooms(recipe: Recipe, split: str, count: int, folder: Path) -> Rooms:
    """Load the first ``count`` levels of a split; training levels are cached in ``folder``, since drawing is slow."""
    tasks = make_task_set(recipe, split)
    if split != "train":
        return Rooms.build([tasks[n] for n in range(min(count, len(tasks)))])
    file = folder / f"levels-{recipe.name}-{count}.json"
    if not file.exists():
        write_json(file, [(t.id, t.subtask, t.instruction, dict(t.content)) for t in (tasks[n] for n in range(count))])
    listed = json.loads(file.read_text(encoding="utf-8"))
    return Rooms.build([Task(id=i, split=split, subtask=s, instruction=t, content=c) for i, s, t, c in listed])


class Bench:
    """Shared data of the runs of a comparison: levels and the initial policy, cached in ``folder``."""

    alone = False
    """Runs may be concurrent."""

    def __init__(self, comparison: LabComparison, folder: Path) -> None:
        torch.set_num_threads(1)
        self.comparison, turns = comparison, comparison.training.turns
        recipe, first = comparison.levels.recipe, comparison.start
        self.rooms = load_rooms(recipe, "train", comparison.training.levels, folder)
        valid = Examiner(load_rooms(recipe, "valid", 256, folder), turns)
        if comparison.panel is Panel.TRAIN:
            self.panel, self.tuning = self.rooms, Examiner(self.rooms, turns)
            self.examiner = self.tuning
        else:
            self.panel = load_rooms(recipe, "test", 256, folder)
            self.examiner, self.tuning = Examiner(self.panel, turns), valid
        name = f"start-{recipe.name}-{first.success:g}-{first.levels}-{first.hidden}-{turns}.safetensors"
        self.policy = BoardPolicy(self.rooms.cells, first.hidden)
        if not (folder / name).exists():
            wide = Recipe(comparison.levels.height, comparison.levels.width)
            taught = load_rooms(wide, "train", first.levels, folder)
            made = clone_expert(taught, valid, first.success, turns=turns, hidden=first.hidden)
            with draft_file(folder / name) as draft:
                save_file(made.state_dict(), draft)
        self.policy.load_state_dict(load_file(folder / name))
        self.tasks = [task.id for task in self.panel.tasks]

    @property
    def start(self) -> float:
        """Success of the first policy on the panel."""
        return float(self.examiner.examine(self.policy).mean())

    def run(self, plan: RunPlan) -> dict[str, Any]:
        """Make a run; return its result as plain values."""
        start, comparison = time.process_time(), self.comparison
        policy = BoardPolicy(self.rooms.cells, comparison.start.hidden)
        policy.load_state_dict(self.policy.state_dict())
        arm, settings = comparison.arms[plan.arm], comparison.training
        training = Training(self.rooms, policy, arm, settings, rate=plan.rate, seed=plan.seed)
        examiner = self.tuning if plan.tuning else self.examiner
        result = train(training, examiner, looks=comparison.looks, budget=settings.budget)
        about = {"arm": plan.arm, "rate": plan.rate, "seed": plan.seed, "digest": comparison.digest}
        return {**about, "code": digest_code(), **result, "cpu_seconds": round(time.process_time() - start, 2)}


AnyBench: TypeAlias = "Bench | TrainerBench"
"""Makes runs: in this process, or by the trainer."""


@lru_cache(maxsize=1)
def _open_bench(written: str, folder: Path) -> Bench:
    """The bench of a process of the pool."""
    return Bench(LabComparison.from_mapping(json.loads(written)), folder)


def _run_here(written: str, folder: Path, plan: RunPlan) -> dict[str, Any]:
    return _open_bench(written, folder).run(plan)


class Registry:
    """A folder of results of one comparison. Raises SpearError if it belongs to another one."""

    def __init__(self, comparison: Comparison, out: Path) -> None:
        self.comparison, self.out = comparison, out
        file = out / REGISTERED
        if not file.exists():
            (out / "runs").mkdir(parents=True, exist_ok=True)
            write_json(file, {"digest": comparison.digest, "comparison": comparison.to_mapping()})
        elif (found := json.loads(file.read_text(encoding="utf-8"))["digest"]) != comparison.digest:
            raise SpearError(
                f"{out} is of another comparison ({found[:12]}, this file is {comparison.digest[:12]}): "
                "registered comparisons are fixed; choose another --out"
            )

    def read(self, plan: RunPlan) -> dict[str, Any] | None:
        """Read the result of a run, or None."""
        file = self.out / "runs" / f"{plan.name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def keep(self, plan: RunPlan, result: Mapping[str, Any]) -> None:
        """Write a result."""
        write_text(self.out / "runs" / f"{plan.name}.json", json.dumps(result) + "\n")

    def list_tuning(self, arm: str) -> list[RunPlan]:
        """Runs that choose the rate of an arm; none for a single rate."""
        rates, seeds = self.comparison.rates, range(self.comparison.tuning_seeds)
        return [RunPlan(arm, rate, TUNING_SEED + seed) for seed in seeds for rate in rates] if len(rates) > 1 else []

    def choose_rate(self, arm: str) -> float:
        """The rate with the best mean success in the tuning runs, the lower in case of a tie.

        Raises SpearError if a tuning run is missing.
        """
        if len(self.comparison.rates) == 1:
            return self.comparison.rates[0]
        found: dict[float, list[float]] = {}
        for plan in self.list_tuning(arm):
            result = self.read(plan)
            if result is None:
                raise SpearError(f"{self.out} lacks {plan.name}: spear lab run resumes where it stopped")
            found.setdefault(plan.rate, []).append(result["success"])
        return max(sorted(found), key=lambda rate: float(np.mean(found[rate])))

    def list_reported(self, arm: str) -> list[RunPlan]:
        """List the reported runs of an arm."""
        rate = self.choose_rate(arm)
        return [RunPlan(arm, rate, seed) for seed in range(self.comparison.seeds)]

    def count(self) -> tuple[int, int]:
        """Number of finished runs, and of all runs."""
        made = len(list((self.out / "runs").glob("*.json")))
        return made, len(self.comparison.arms) * (len(self.list_tuning("")) + self.comparison.seeds)

    def gather(self, bench: AnyBench) -> None:
        """Write :data:`RESULT`: all runs in one file, with their comparison."""
        runs = [self.read(plan) for arm in self.comparison.arms for plan in self.list_reported(arm)]
        tuned = [self.read(plan) for arm in self.comparison.arms for plan in self.list_tuning(arm)]
        content = {
            "digest": self.comparison.digest,
            "comparison": self.comparison.to_mapping(),
            "tasks": bench.tasks,
            "start": bench.start,
            "tuning": [{name: run[name] for name in ("arm", "rate", "seed", "success")} for run in tuned if run],
            "runs": runs,
        }
        write_text(self.out / RESULT, json.dumps(content) + "\n")

    def list_missing(self) -> Iterator[list[RunPlan]]:
        """Missing runs: first those that choose rates, then the others, seed by seed."""
        arms = list(self.comparison.arms)
        yield [plan for arm in arms for plan in self.list_tuning(arm) if self.read(plan) is None]
        reported = [self.list_reported(arm) for arm in arms]
        yield [plan for seed in zip(*reported, strict=True) for plan in seed if self.read(plan) is None]


def run_all(registry: Registry, jobs: int, on_run: Callable[[], None]) -> None:
    """Make all missing runs, then the file with all results."""
    cache = registry.out.parent / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    bench: AnyBench  # makes the data that all processes read
    if isinstance(registry.comparison, TrainerComparison):
        from benchmarks.lab.trainer_runs import TrainerBench  # imports transformers

        bench = TrainerBench(registry.comparison, cache, registry.out)
    else:
        assert isinstance(registry.comparison, LabComparison)
        bench = Bench(registry.comparison, cache)
    for plans in registry.list_missing():
        for plan, result in _make(bench, cache, plans, jobs):
            registry.keep(plan, result)
            on_run()
    registry.gather(bench)


def _make(bench: AnyBench, cache: Path, plans: list[RunPlan], jobs: int) -> Iterator[tuple[RunPlan, dict[str, Any]]]:
    """Yield results of runs as they finish, from this process or several."""
    if jobs == 1 or bench.alone:
        yield from ((plan, bench.run(plan)) for plan in plans)
        return
    written = json.dumps(bench.comparison.to_mapping())
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting = {pool.submit(_run_here, written, cache, plan): plan for plan in plans}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
