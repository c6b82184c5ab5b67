"""The cells of a table as jobs: the commands that make each, how far it is, and what it costs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runner.running import count_steps, run_spear
from spear_agents.comparison.statistics import Estimate
from spear_agents.comparison.tables import Cell
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.options import REFLEXION_TRIALS
from spear_agents.evaluation.panels import open_panel
from spear_agents.evaluation.run import SUMMARY
from spear_agents.evaluation.settings import EngineKind, EvalSettings, PlayedPanel
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.data.files import MANIFEST
from spear_training.planning.cli import make_plan
from spear_training.planning.memory import read_known
from spear_training.run.compose import compose, quote_value
from spear_training.run.config import RunConfig
from spear_training.run.to_verl import CHECKPOINTS

HOURS, GPUS = 60, 32
"""Most hours and GPUs that the optimisation of a model takes on ALFWorld or WebShop, by the paper's "Computing
Resources".
"""
MACHINE = 8
"""GPUs of the machine whose hours are estimated."""
CONVERSATION = 28_672
"""Tokens of ReAct and Reflexion after the first prompt. The paper does not say; with WebShop's longest prompt they fill
the context of Qwen2.5."""
TINY_SETTINGS = (
    "train.steps=4",
    "checkpoint.every=4",
    "checkpoint.keep=1",
    "validation.at_start=false",
    "validation.every=null",
    "record.episodes=0",
    "log.to=[file]",
    # So that rows are replayed within the four steps.
    "sil.warmup_steps=2",
    "replay.capacity=64",
)
"""Settings of every tiny training, laid over its preset."""
TINY = "tiny"
"""The only model of a tiny table."""


class Flavour(str, Enum):
    """How the trainings are set."""

    PAPER = "paper"
    """By the paper's table of hyper-parameters."""
    OFFICIAL = "official"
    """As the authors' published code."""
    TINY = "tiny"
    """Tiny policies on a CPU, a few steps each."""


@dataclass(frozen=True)
class Row:
    """A method of a table: a prompting method, or an algorithm that trains."""

    name: str
    type: str
    title: str
    over: str | None = None
    """The row that the paper compares it with."""

    @property
    def method(self) -> Method | None:
        """How a model is prompted; None for a row that trains."""
        return Method(self.name) if self.name in {each.value for each in Method} else None


@dataclass(frozen=True)
class Environment:
    """Some columns of a table, and the panel that they are played on."""

    name: str
    title: str
    columns: Sequence[str]
    panel: str
    tasks: int
    tiny: Mapping[str, Any]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: what it compares, and its figures in percent by model and row."""

    environments: Mapping[str, Environment]
    models: Mapping[str, str]
    """Titles by name."""
    rows: Mapping[str, Row]
    figures: Mapping[str, Mapping[str, Sequence[float]]]


@lru_cache
def read_table(name: str = "table1") -> PaperTable:
    """Read a table of the paper from its file."""
    plain = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text("utf-8"))
    environments = {name: Environment(name, **values) for name, values in plain["environments"].items()}
    rows = {name: Row(name, **values) for name, values in plain["rows"].items()}
    return PaperTable(environments, plain["models"], rows, plain["figures"])


@dataclass(frozen=True)
class Step:
    """A command of ``spear`` and the file or folder that shows that it is done."""

    name: str
    words: tuple[str, ...]
    made: Path


@dataclass(frozen=True)
class Result:
    """An evaluation without a fault: the panel it was played on, and its cells of the table."""

    panel: PlayedPanel | None
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Cost:
    """Upper bounds of a job: tokens of its rows, the longest that are allowed, and hours on :data:`MACHINE` GPUs."""

    tokens: float
    hours: float | None
    """None for a tiny policy."""


@dataclass(frozen=True)
class Job:
    """A method with a model on an environment, and the seed of its training; a prompting method has seed 0 alone.

    ``out`` is the folder of the table and ``best`` evaluates the checkpoint that was best in validation instead of the
    last.
    """

    row: Row
    model: str
    environment: Environment
    seed: int
    flavour: Flavour
    out: Path
    cluster: str = "8gpu"
    best: bool = False

    @property
    def name(self) -> str:
        """Name of the job, and of its folder below the table's."""
        seed = f"-{self.seed}" if self.row.method is None else ""
        return f"{self.flavour.value}/{self.environment.name}/{self.model}/{self.row.name}{seed}"

    @property
    def folder(self) -> Path:
        """Its run, its policy, its evaluation and the log of its commands."""
        return self.out / self.name

    @property
    def evaluation(self) -> Path:
        """Folder of ``spear eval --out``."""
        return self.folder / ("eval-best" if self.best else "eval")

    @property
    def tiny(self) -> bool:
        """Whether its policy is a tiny one."""
        return self.flavour is Flavour.TINY

    @property
    def start(self) -> Path:
        """The warm start of tiny policies."""
        return self.out / self.flavour.value / self.environment.name / "start"

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Arguments of ``spear train`` besides ``--out``; for a prompting method those that tell the environment."""
        algorithm = "grpo" if self.row.method else self.row.name
        if self.tiny:
            preset, cluster = f"{self.environment.name}_tiny", "cpu"
            own = [*TINY_SETTINGS, f"model.path={quote_value(str(self.start.resolve()))}"]
        else:
            prefix = "official/" if self.flavour is Flavour.OFFICIAL else ""
            preset, cluster, own = f"{prefix}{self.environment.name}_{self.model}", self.cluster, ["checkpoint.keep=1"]
        return (f"preset={preset}", f"algorithm={algorithm}", f"cluster={cluster}", *own, f"seed={self.seed}")

    @cached_property
    def config(self) -> RunConfig:
        """Configuration of its training."""
        return compose(self.words).config

    # ---- commands --------------------------------------------------------------------------------------------------
    def list_steps(self) -> Iterator[Step]:
        """Its commands in order."""
        run, policy = self.folder / "run", str(self.start) if self.tiny else str(self.config.model.path)
        if self.tiny:
            yield Step("warm start", ("warmstart", self.config.env.id, "--out", policy), self.start)
        if self.row.method is None:
            last = run / CHECKPOINTS / f"global_step_{self.config.train.steps}" / MANIFEST
            yield Step("training", ("train", *self.words, "--out", str(run)), last)
            made = self.folder / ("policy-best" if self.best else "policy")
            best = ["--best"] if self.best else []
            yield Step("export", ("export", str(run), "--out", str(made), *best), made)
            policy = str(made)
        options, keywords = self._list_options()
        words = ["eval", "--panel", self.environment.panel, "--engine", "hf" if self.tiny else "vllm"]
        words += ["--model", policy]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value.value if isinstance(value, Enum) else value)]
        for name, value in keywords.items():
            words += ["--env", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        yield Step("evaluation", (*words, "--out", str(self.evaluation)), self.evaluation / SUMMARY)

    def _list_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of ``spear eval`` and keywords of the environment that the panel has otherwise.

        A policy is prompted as it was trained.
        """
        panel, env = open_panel(self.environment.panel), self.config.env
        options: dict[str, Any] = {}
        if self.tiny:
            options |= {"tasks": str(self.environment.tasks), "episodes_per_task": 1}
        if self.row.method is None:
            options |= {"template": env.template, "history": env.history}
        else:
            options["method"] = self.row.method
            if self.row.method is not Method.IO and not self.tiny:
                options["max_row_tokens"] = CONVERSATION
        options = {name: value for name, value in options.items() if value != getattr(panel.protocol, name, None)}
        own = {"split": panel.split, "anchor": env.kwargs.get("anchor"), **panel.env_kwargs}  # anchors are of training
        return options, {name: value for name, value in env.kwargs.items() if own.get(name) != value}

    def find_panel(self) -> PlayedPanel:
        """The panel that its evaluation must have been played on. Raises SpearError for missing data."""
        options, keywords = self._list_options()
        return _settle(self.environment.panel, tuple(options.items()), json.dumps(keywords))

    # ---- state -----------------------------------------------------------------------------------------------------
    def find_next(self) -> Step | None:
        """The first command that has not been done; None if there is an evaluation without a fault."""
        *before, evaluation = self.list_steps()
        if evaluation.made.is_file():
            return None if self._read_result() else evaluation
        # A step is not done again if a later one is: weights may have been thrown away since.
        for place in reversed(range(len(before))):
            if before[place].made.exists():
                return (*before, evaluation)[place + 1]
        return (*before, evaluation)[0]

    def read(self) -> tuple[Result | None, str]:
        """Its result, or None and why there is none. Raises SpearError if its panel's data are missing."""
        step = self.find_next()
        if step is not None:
            if step.made.is_file():
                return None, "episodes were cut short by a fault"
            done = count_steps(self.folder / "run") if step.name == "training" else 0
            return None, f"training at step {done} of {self.config.train.steps}" if done else f"no {step.name}"
        result, wanted = self._read_result(), self.find_panel()
        assert result is not None
        if result.panel is None or result.panel.digest != wanted.digest:
            other = "no panel" if result.panel is None else f"panel {result.panel.label}"
            return None, f"{self.evaluation} was played on {other}, not on {wanted.label}"
        return result, ""

    def _read_result(self) -> Result | None:
        """Return the result of ``spear eval``; None if a fault cut an episode short. Raises SpearError for something
        else.
        """
        path = self.evaluation / SUMMARY
        try:
            written = json.loads(path.read_text("utf-8"))
            cells = [Cell(cell["heading"], _read_estimate(cell["estimate"])) for cell in written["table"]]
            return None if written["overall"]["faults"] else Result(PlayedPanel.read(written["settings"]), cells)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SpearError(f"{path} cannot be read ({type(error).__name__}): remove its folder.") from error

    def do(self, step: Step) -> str:
        """Run a command; why it failed, or an empty text. The output goes to ``log.txt`` in the job's folder."""
        log, run = self.folder / "log.txt", self.folder / "run"
        if step.name == "training" and count_steps(run) >= self.config.train.steps and not (run / CHECKPOINTS).exists():
            return f"its checkpoints were removed: remove {run}, too, to train again"
        code = run_spear(step.words, log)
        following = self.find_next()
        if code == 0 and following != step:
            return ""
        said = log.read_text("utf-8", "replace").strip().splitlines()
        return f"exit code {code} ({said[-1] if said else 'no output'}), see {log}"

    def prune(self) -> None:
        """Remove the checkpoints of its training; the policy stays."""
        shutil.rmtree(self.folder / "run" / CHECKPOINTS, ignore_errors=True)

    # ---- cost ------------------------------------------------------------------------------------------------------
    @cached_property
    def cost(self) -> Cost:
        """Cost of the whole job, done or not.

        The heaviest training of the table takes the paper's hours, and everything else takes time in proportion to
        tokens and parameters.
        """
        config, options = self.config, self._list_options()[0]
        rollout, turns = config.rollout, int(self.config.env.kwargs["max_turns"])
        row = turns * (rollout.max_prompt_length + rollout.max_response_length)
        if "max_row_tokens" in options:  # one conversation
            row = rollout.max_prompt_length + options["max_row_tokens"]
        tokens = float(self.environment.tasks * _count_trials(options) * row)
        if self.row.method is None:
            tokens += count_tokens(self.words) * config.train.steps
        if self.tiny:
            return Cost(tokens, None)
        work = tokens * _count_parameters(config)
        return Cost(tokens, HOURS * GPUS / MACHINE * work / _measure_heaviest())


@lru_cache
def count_tokens(words: tuple[str, ...]) -> float:
    """Tokens of a training step, every row at its full length, as ``spear plan`` counts them."""
    return make_plan(compose((*words, "model.path=null")), {}, 0.0).step["tokens"]


def _count_trials(options: Mapping[str, Any]) -> int:
    return REFLEXION_TRIALS if options.get("method") is Method.REFLEXION else 1


def _count_parameters(config: RunConfig) -> float:
    return float(read_known()[str(config.model.path)]["parameters"])


@lru_cache
def _measure_heaviest() -> float:
    """Tokens times parameters of the heaviest training of the paper's table."""
    table, found = read_table(), []
    for environment in table.environments.values():
        for model in table.models:
            job = Job(table.rows["grpo"], model, environment, 0, Flavour.PAPER, Path())
            found.append(count_tokens(job.words) * job.config.train.steps * _count_parameters(job.config))
    return max(found)


@lru_cache
def _settle(panel: str, options: tuple[tuple[str, Any], ...], keywords: str) -> PlayedPanel:
    given, env_kwargs = dict(options), json.loads(keywords)
    opened = open_panel(panel)
    settings = EvalSettings(opened.env_id, EngineKind.HF, "policy", env_kwargs, trials=_count_trials(given), **given)
    played = opened.settle(settings, given.keys()).panel
    assert played is not None
    return played


def _read_estimate(written: Mapping[str, Any] | None) -> Estimate | None:
    if written is None:
        return None
    low, high = (math.inf if written[bound] is None else written[bound] for bound in ("ci95_low", "ci95_high"))
    return Estimate(written["mean"], low, high, written["tasks"])


@dataclass(frozen=True)
class Choice:
    """Which jobs of the table are wanted: patterns of names, and the number of seeds."""

    rows: Sequence[str] = ("*",)
    models: Sequence[str] = ("*",)
    environments: Sequence[str] = ("*",)
    seeds: int = 3
    flavour: Flavour = Flavour.PAPER
    out: Path = field(default_factory=lambda: Path("runs/table1"))
    cluster: str = "8gpu"
    best: bool = False

    @property
    def known_models(self) -> Mapping[str, str]:
        """Titles of the models of this flavour, by name."""
        return {TINY: "Tiny policies"} if self.flavour is Flavour.TINY else read_table().models

    def list_jobs(self) -> list[Job]:
        """The jobs in the order they are run: one seed after another, so that a table is soon complete.

        Raises:
            SpearError: a pattern that fits nothing.
        """
        table = read_table()
        rows = [table.rows[name] for name in _match("row", self.rows, table.rows)]
        models = _match("model", self.models, self.known_models)
        environments = [
            _shrink(table.environments[name]) if self.flavour is Flavour.TINY else table.environments[name]
            for name in _match("environment", self.environments, table.environments)
        ]
        return [
            Job(row, model, environment, seed, self.flavour, self.out, self.cluster, self.best)
            for seed in range(self.seeds)
            for model in models
            for row in rows
            for environment in environments
            if row.method is None or seed == 0
        ]


def _shrink(environment: Environment) -> Environment:
    return Environment(environment.name, environment.title, environment.columns, **environment.tiny, tiny={})


def _match(kind: str, patterns: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in known):
            hint = suggest_name(pattern, list(known))
            raise SpearError(f"There is no {kind} {pattern!r}.{hint} The table has {', '.join(known)}.")
    return [name for name in known if any(fnmatch(name, pattern) for pattern in patterns)]
