"""Runs the trials of the ablation one after another, and records what came out of each in a small JSON file."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ablations.plan import TUNING_SEED, Scenario, Trial, list_trials
from benchmarks.runner.running import POLL_S, count_steps, run_spear
from spear_agents.comparison.statistics import average_by_task
from spear_agents.evaluation.records import read_history
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EvalSettings
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_json
from spear_training.run.compose import compose, quote_value
from spear_training.run.config import RunConfig
from spear_training.run.launch import read_run
from spear_training.warmstart import train_policy

__all__ = ["Ablation", "choose_rates", "read_result"]

TEMPERATURE = 1.0
"""Temperature of every evaluation; that of the training, and so of the warm start that all arms are compared with."""
ATTEMPTS = 2
"""Launches without a new step after which a trial is left out."""
WARM_START = "warmstart"
CURVES = {
    "success": "success/all",
    "entropy": "entropy/token-mean",
    "tool_calls": "tool_calls/mean",
    "turns": "turns/mean",
    "well_formed": "turns/well_formed",
    "valid_action": "turns/valid_action",
    "drawn": "replay/drawn",
    "replay_size": "replay/size",
    "n_sil": "replay/n_sil",
    "cov_fraction": "clip/cov_fraction",
    "ppo_fraction": "clip/ppo_fraction",
    "p50": "baseline/p50",
    "seconds": "perf/step_seconds",
}
"""Figures recorded of every step, each with its name among the metrics of a run."""


class OutOfTime(Exception):
    """The call's time is over; what was begun is resumed by the next."""


def read_result(results: Path, scenario: Scenario, name: str) -> dict[str, Any] | None:
    """The record of a trial or of the warm start, None where there is none yet."""
    path = results / scenario.name / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def choose_rates(results: Path, scenario: Scenario) -> dict[str, str]:
    """The learning rate of each arm whose tuning is recorded: best on the valid panel, the lower of equals."""
    rates: dict[str, str] = {}
    for arm in scenario.arms:
        records = [read_result(results, scenario, trial.name) for trial in scenario.list_tuning(arm)]
        if not records:
            rates[arm] = scenario.rates[0]
        elif all(record is not None for record in records):
            means = [record["valid_panel"]["mean"] for record in records if record is not None]
            rates[arm] = scenario.rates[means.index(max(means))]
    return rates


class Ablation:
    """The work of the given scenarios.

    Args:
        out: run folders, checkpoints and evaluations; may be thrown away when all is recorded.
        results: recorded results.
        scenarios: what to run.
        console: one line for each thing that is begun or done.
    """

    def __init__(self, out: Path, results: Path, scenarios: Sequence[Scenario], console: Console) -> None:
        self.out = out
        self.results = results
        self.scenarios = scenarios
        self.console = console
        self.failed: dict[str, str] = {}
        """Trials that were left out, with the reason."""

    @property
    def finished(self) -> bool:
        """Whether every trial of every scenario is recorded."""
        return all(
            len(choose_rates(self.results, scenario)) == len(scenario.arms) and not list(self._find_open(scenario))
            for scenario in self.scenarios
        )

    def run(self, seconds: float) -> None:
        """Do what is missing until it is done or the time is over."""
        deadline = time.monotonic() + seconds
        try:
            while not self.finished:
                if not any([self._work_on(scenario, deadline) for scenario in self.scenarios]):
                    if self.failed:
                        return
                    self._wait(deadline)  # the rest is being done by another call
        except OutOfTime:
            self.console.print("time is over; the same command resumes")

    def show(self) -> None:
        """Print a table of what is recorded and what is left."""
        table = Table("scenario", "trial", "steps", "valid panel", "test panel")
        for scenario in self.scenarios:
            for name in (WARM_START, *(trial.name for trial in self._list(scenario))):
                record = read_result(self.results, scenario, name)
                if record is None:
                    history = read_history(self._folder(scenario, name))
                    table.add_row(scenario.name, name, str(history[-1]["step"]) if history else "", "", "")
                    continue
                shown = [record[key]["mean"] if key in record else None for key in ("valid_panel", "test_panel")]
                table.add_row(
                    scenario.name,
                    name,
                    str(record.get("steps", "")),
                    *("" if mean is None else f"{100 * mean:.1f} %" for mean in shown),
                )
        self.console.print(table)
        for name, reason in self.failed.items():
            self.console.print(f"left out: {name}: {reason}")

    # ---- the order of things ---------------------------------------------------------------------------------------
    def _list(self, scenario: Scenario) -> Iterator[Trial]:
        return list_trials(scenario, choose_rates(self.results, scenario))

    def _find_open(self, scenario: Scenario) -> Iterator[Trial]:
        for trial in self._list(scenario):
            if read_result(self.results, scenario, trial.name) is None and _name(trial) not in self.failed:
                yield trial

    def _work_on(self, scenario: Scenario, deadline: float) -> bool:
        """Do the next thing of a scenario; whether there was one that no other call is at."""
        if read_result(self.results, scenario, WARM_START) is None:
            with self.claim(scenario, WARM_START) as free:
                if free:
                    self._make_warm_start(scenario)
                return free
        for trial in self._find_open(scenario):
            with self.claim(scenario, trial.name) as free:
                if free and read_result(self.results, scenario, trial.name) is None:
                    try:
                        self._do(trial, deadline)
                    except SpearError as error:  # the others go on
                        self.failed[_name(trial)] = str(error)
                    return True
        return False

    @contextmanager
    def claim(self, scenario: Scenario, name: str) -> Iterator[bool]:
        """Yield whether this call may work on it; another cannot as long as the block lasts."""
        path = self.out / scenario.name / f".{name}.claim"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def _wait(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise OutOfTime
        time.sleep(POLL_S)

    def _folder(self, scenario: Scenario, name: str) -> Path:
        return self.out / scenario.name / name

    # ---- one thing -------------------------------------------------------------------------------------------------
    def _make_warm_start(self, scenario: Scenario) -> None:
        folder = self._folder(scenario, WARM_START)
        if not (folder / "config.json").is_file():
            self.console.print(f"{scenario.name}: making the warm start")
            train_policy(scenario.warm_start, folder, overwrite=folder.exists())
        self.console.print(f"{scenario.name}: evaluating the warm start")
        trial = Trial(scenario, scenario.arms[0], scenario.rates[0], TUNING_SEED)  # any: all have the same environment
        config = compose(trial.list_overrides(_quote(folder))).config
        record = {
            "scenario": scenario.name,
            "warm_start": json.loads((folder / "warmstart.json").read_text(encoding="utf-8")),
            **self._evaluate(scenario, folder, config, self.out / scenario.name / "eval" / WARM_START, test=True),
        }
        write_json(self.results / scenario.name / f"{WARM_START}.json", record)

    def _do(self, trial: Trial, deadline: float) -> None:
        scenario = trial.scenario
        folder = self._folder(scenario, trial.name)
        overrides = trial.list_overrides(_quote(self._folder(scenario, WARM_START)))
        for _ in range(ATTEMPTS):
            before = count_steps(folder)
            if before >= scenario.steps:
                break
            self.console.print(f"{_name(trial)}: training from step {before} of {scenario.steps}")
            words = ("train", "--out", str(folder), *overrides)
            run_spear(words, folder.with_name(f"{folder.name}.log"), lambda: self._wait(deadline))
            if before < count_steps(folder) < scenario.steps:
                return  # it got on, so it is tried again
        if count_steps(folder) < scenario.steps:
            self.failed[_name(trial)] = f"no step beyond {count_steps(folder)}, see {folder}.log"
            return
        self._record(trial, folder, overrides)

    def _record(self, trial: Trial, folder: Path, overrides: Sequence[str]) -> None:
        scenario = trial.scenario
        self.console.print(f"{_name(trial)}: evaluating")
        history = read_history(folder)
        steps = [record for record in history if "training/global_step" in record]
        config = read_run(folder)
        policy = folder / "checkpoints" / f"global_step_{scenario.steps}" / "actor" / "huggingface"
        where = self.out / scenario.name / "eval" / trial.name
        record = {
            "scenario": scenario.name,
            "arm": trial.arm,
            "seed": trial.seed,
            "rate": trial.rate,
            "steps": scenario.steps,
            "episodes": scenario.steps * config.train.batch_size * config.rollout.group_size,
            "settings": config.to_mapping(),
            "command": [item for item in overrides if not item.startswith("model.path=")],
            "code": _describe_code(),
            "curves": {name: [_round(step.get(key)) for step in steps] for name, key in CURVES.items()},
            "valid": [[r["step"], _round(r["val/success/all"])] for r in history if "val/success/all" in r],
            **self._evaluate(scenario, policy, config, where, test=not trial.tuning),
        }
        write_json(self.results / scenario.name / f"{trial.name}.json", record)
        shutil.rmtree(where)  # the figures are recorded; episodes of all trials would take gigabytes

    def _evaluate(
        self, scenario: Scenario, policy: Path, config: RunConfig, where: Path, *, test: bool
    ) -> dict[str, Any]:
        """Whole panels: ``valid_panel``, and ``test_panel`` if asked for."""
        environment = config.env
        settings = EvalSettings(
            environment.id,
            model=str(policy),
            env_kwargs=environment.kwargs,
            split=environment.valid_split,
            episodes_per_task=scenario.samples,
            temperature=TEMPERATURE,
            template=environment.template,
            layout=environment.layout,
            history=environment.history,
            max_tokens=config.rollout.max_response_length,
        )
        panels = {"valid_panel": settings}
        if test:
            panels["test_panel"] = replace(settings, split=scenario.test_split)
        return {name: _play_panel(chosen, where / name) for name, chosen in panels.items()}


def _play_panel(settings: EvalSettings, where: Path) -> dict[str, Any]:
    """Figures of one panel and the share won of each task, in the order of the task set."""
    evaluation = run_evaluation(settings, where, deterministic=True)
    part = evaluation.overall
    assert part.success is not None
    trajectories: Sequence[Trajectory] = evaluation.trajectories
    won = average_by_task(trajectories)
    return {
        "split": settings.split,
        "samples": settings.episodes_per_task,
        "temperature": settings.temperature,
        "fingerprint": evaluation.fingerprint,
        "mean": part.success.mean,
        "score": part.score,
        "turns": _round(part.turns),
        "well_formed": _round(part.format_ok),
        "valid_action": _round(part.action_ok),
        "faults": part.faults,
        "won": {task: _round(share) for task, share in sorted(won.items())},
    }


def _name(trial: Trial) -> str:
    return f"{trial.scenario.name}/{trial.name}"


def _describe_code() -> str:
    """The commit that ran, with a mark where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _quote(folder: Path) -> str:
    return quote_value(str(folder.resolve()))


def _round(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)
