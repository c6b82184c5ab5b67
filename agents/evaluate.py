"""Evaluates a policy on a fixed list of tasks, resumably, and compares two evaluations."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

import spear_envs
from agents.engines.base import Engine, Sampling
from agents.engines.bytes import ByteTokenizer
from agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine, random_policy
from agents.files import digest_model, write_json
from agents.prompting import PromptBuilder, Tokenizer
from agents.rollout import Job, play_many
from agents.statistics import Comparison, Part, compare_trajectories, summarise
from agents.trajectory import Layout, Trajectory, TrajectoryWriter, read_trajectories
from spear_envs.core.env import SpearEnv
from spear_envs.core.errors import SpearError

EPISODES, SUMMARY, SETTINGS = "episodes.jsonl", "summary.json", "settings.json"
MAX_SAMPLES = 10_000


class EngineKind(str, Enum):
    """Who plays."""

    HF = "hf"
    """A model in a Hugging Face folder, run by transformers."""
    RANDOM = "random"
    """A uniform choice among the admissible actions, well formed."""
    EXPERT = "expert"
    """The environment's own oracle."""


@dataclass(frozen=True)
class EvalSettings:
    """Everything an evaluation's numbers depend on.

    Attributes:
        env_id: such as ``spear/Sokoban-v0``.
        env_kwargs: keywords of the environment besides ``split``.
        model: folder of the model (``hf`` only).
        split: None for the last of the environment's splits.
        tasks: ``"all"``, the number of leading tasks, or ids separated by commas.
        max_tokens: limit of a response; None takes the model's own (``generation_config.max_new_tokens``), else 512.
    """

    env_id: str
    engine: EngineKind = EngineKind.HF
    model: str | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None
    tasks: str = "all"
    episodes_per_task: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    max_prompt_tokens: int | None = None
    template: str = "compact"
    layout: Layout = Layout.PER_TURN
    history: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.episodes_per_task <= MAX_SAMPLES:
            raise SpearError(f"episodes per task must lie between 1 and {MAX_SAMPLES}, got {self.episodes_per_task}")
        if self.engine is EngineKind.HF and self.model is None:
            raise SpearError("engine hf needs a model folder: give --model DIR, or take --engine random or expert")

    def sampling(self) -> Sampling:
        """The sampling of these settings.  Raises SpearError where a value is out of range."""
        try:
            return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens or 512)
        except ValueError as error:
            raise SpearError(str(error)) from error

    def jobs(self, task_ids: Sequence[str]) -> list[Job]:
        """All samples of all tasks, the first sample of every task before the second of any."""
        base = self.seed * MAX_SAMPLES
        return [Job(task_id, base + k) for k in range(self.episodes_per_task) for task_id in task_ids]


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation, and the episodes behind them."""

    settings: EvalSettings
    fingerprint: str
    overall: Part
    subtasks: Mapping[str, Part]
    trajectories: Sequence[Trajectory]
    seconds: float


class Observer(Protocol):
    """Who watches an evaluation, for instance a progress bar."""

    def __call__(self, done: int, total: int, trajectory: Trajectory | None) -> None:
        """Called at the beginning (with what was already played) and after each episode."""
        ...


def find_splits(env_id: str) -> tuple[str, ...]:
    """The splits of an environment, in the order of ``SpearEnv.splits``: to train, to validate and to test on.

    Raises:
        SpearError: there is no such environment.
    """
    module, colon, name = env_id.rpartition(":")
    try:
        if colon:
            importlib.import_module(module)
        entry_point = gym.spec(name).entry_point
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (gym.error.Error, ImportError) as error:
        raise _explain_unknown(error) from error
    return tuple(getattr(creator, "splits", SpearEnv.splits))


def make_env(env_id: str, split: str, keywords: Mapping[str, Any]) -> gym.Env[Any, Any]:
    """Makes an environment by its id.  Raises SpearError where id or keywords are unknown."""
    try:
        return gym.make(env_id, split=split, disable_env_checker=True, **keywords).unwrapped
    except gym.error.Error as error:
        raise _explain_unknown(error) from error
    except TypeError as error:
        # gymnasium appends all keywords to the message of a constructor that refuses one.
        problem = str(error).split(" was raised from")[0]
        raise SpearError(f"{env_id} cannot be made: {problem}") from error


def _explain_unknown(error: Exception) -> SpearError:
    first = str(error).strip().split("\n")[0]
    known = ", ".join(name for name in gym.registry if name.startswith("spear/"))
    return SpearError(f"{first} Environments of this package: {known}")


def choose_tasks(env: gym.Env[Any, Any], selection: str) -> list[str]:
    """Task ids of ``"all"``, of the first N, or of a list of ids.  Raises UnknownTaskError or SpearError."""
    tasks: Any = env.unwrapped.tasks  # type: ignore[attr-defined]
    if selection == "all":
        if not tasks.bounded:
            raise SpearError(f"the split {tasks.split} has {len(tasks):,} generated tasks: ask for a number of them")
        return [task.id for task in tasks]
    if selection.isdigit():
        count = int(selection)
        if not 1 <= count <= len(tasks):
            raise SpearError(
                f"tasks={count}: the split {tasks.split} has {len(tasks):,} tasks, ask for 1 or more of them"
            )
        return [tasks[i].id for i in range(count)]
    return list(dict.fromkeys(tasks.get(name.strip()).id for name in selection.split(",")))


def choose_template(env: gym.Env[Any, Any], name: str) -> Any:
    """A prompt template of the environment.  Raises SpearError where it has none of this name."""
    templates: Mapping[str, Any] = env.unwrapped.templates  # type: ignore[attr-defined]
    if name not in templates:
        raise SpearError(f"no prompt template {name!r}: this environment has {', '.join(sorted(templates))}")
    return templates[name]


def run_evaluation(
    settings: EvalSettings,
    out: str | Path | None = None,
    *,
    concurrency: int = 128,
    deterministic: bool = False,
    observer: Observer | None = None,
) -> Evaluation:
    """Plays the tasks of ``settings`` and sums up.

    With ``out`` every episode is appended to ``out/episodes.jsonl`` as it ends and the figures go to
    ``out/summary.json``; run again, it plays only what is missing.

    Raises:
        SpearError: a setting that does not exist, a model that cannot be loaded, a folder that cannot be written or
            holds an evaluation with other settings.
    """
    split = settings.split or find_splits(settings.env_id)[-1]
    settings = replace(settings, split=split)
    env = make_env(settings.env_id, split, settings.env_kwargs)
    try:
        fingerprint: str = env.tasks.fingerprint  # type: ignore[attr-defined]
        jobs = settings.jobs(choose_tasks(env, settings.tasks))
        template = choose_template(env, settings.template)
    finally:
        env.close()
    start = time.monotonic()
    with ExitStack() as stack:
        engine_for, tokenizer, settings = _open_engine(settings, template, concurrency, deterministic, stack)
        prompts = PromptBuilder(
            tokenizer,
            template,
            settings.layout,
            history=settings.history,
            max_prompt_tokens=settings.max_prompt_tokens,
        )
        earlier = _resume(Path(out), settings, fingerprint) if out is not None else {}
        played = {key: earlier[key] for job in jobs if (key := (job.task_id, job.seed)) in earlier}
        writer = stack.enter_context(TrajectoryWriter(Path(out) / EPISODES)) if out is not None else None
        if observer is not None:
            observer(len(played), len(jobs), None)

        def record(trajectory: Trajectory) -> None:
            if writer is not None:
                writer.write(trajectory)
            played[trajectory.task_id, trajectory.seed] = trajectory
            if observer is not None:
                observer(len(played), len(jobs), trajectory)

        asyncio.run(
            play_many(
                [job for job in jobs if (job.task_id, job.seed) not in played],
                make_env=lambda: InfoWatch(make_env(settings.env_id, split, settings.env_kwargs)),
                engine_for=engine_for,
                prompts=prompts,
                sampling=settings.sampling(),
                env_id=settings.env_id,
                concurrency=concurrency,
                on_done=record,
            )
        )
    trajectories = [played[job.task_id, job.seed] for job in jobs]
    overall, subtasks = summarise(trajectories)
    evaluation = Evaluation(settings, fingerprint, overall, subtasks, trajectories, time.monotonic() - start)
    if out is not None:
        write_summary(out, evaluation)
    return evaluation


def write_summary(out: str | Path, evaluation: Evaluation, baselines: Mapping[str, Part] | None = None) -> None:
    """Writes ``out/summary.json``.  Raises SpearError where it cannot be written."""
    summary = {
        "settings": asdict(evaluation.settings),
        "fingerprint": evaluation.fingerprint,
        "overall": evaluation.overall.to_json(),
        "subtasks": {name: part.to_json() for name, part in evaluation.subtasks.items()},
        "seconds": round(evaluation.seconds, 2),
        "spear_envs": spear_envs.__version__,
    }
    if baselines:
        summary["baselines"] = {name: part.to_json() for name, part in baselines.items()}
    write_json(Path(out) / SUMMARY, summary)


def compare_runs(before: str | Path, after: str | Path) -> Comparison:
    """The paired difference between two folders of :func:`run_evaluation`.  Raises SpearError where they do not
    match.
    """
    return compare_trajectories(read_trajectories(Path(before) / EPISODES), read_trajectories(Path(after) / EPISODES))


def play_baseline(settings: EvalSettings, kind: EngineKind, *, concurrency: int = 128) -> Part:
    """Figures of a scripted player on the tasks and samples of another evaluation."""
    return run_evaluation(replace(settings, engine=kind, model=None), concurrency=concurrency).overall


def _open_engine(
    settings: EvalSettings, template: Any, concurrency: int, deterministic: bool, stack: ExitStack
) -> tuple[Callable[[gym.Env[Any, Any]], Engine], Tokenizer, EvalSettings]:
    """The engine of each environment, the tokenizer, and the settings with the model's own limit filled in."""
    if settings.engine is EngineKind.HF:
        from agents.engines.hf import HFEngine, HFModel, load_tokenizer  # torch is needed here only

        assert settings.model is not None
        tokenizer = load_tokenizer(settings.model)
        model = HFModel(settings.model)
        limit = settings.max_tokens or model.max_new_tokens or 512
        engine = HFEngine(model, max_batch=concurrency, deterministic=deterministic)
        stack.callback(engine.close)
        return lambda env: engine, tokenizer, replace(settings, max_tokens=limit)

    def engine_for(env: gym.Env[Any, Any]) -> Engine:
        assert isinstance(env, InfoWatch)
        is_random = settings.engine is EngineKind.RANDOM
        return ScriptedEngine(random_policy(env, template) if is_random else NoisyExpert(env, template))

    return engine_for, ByteTokenizer(), settings


def _resume(out: Path, settings: EvalSettings, fingerprint: str) -> dict[tuple[str, int], Trajectory]:
    """Episodes already in ``out``; writes or checks its settings first."""
    wanted = json.loads(json.dumps(asdict(settings))) | {"fingerprint": fingerprint}
    if settings.model is not None:
        wanted["model_digest"] = digest_model(settings.model)
    # More tasks or more samples of the same evaluation may join it.
    for key in ("tasks", "episodes_per_task"):
        wanted.pop(key)
    path = out / SETTINGS
    if not path.exists():
        if (out / EPISODES).exists():
            raise SpearError(f"{out} holds {EPISODES} but no {SETTINGS}: choose another folder")
        write_json(path, wanted)
        return {}
    found = _read_settings(path)
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        key = differing[0]
        raise SpearError(
            f"{out} holds an evaluation with {key}={found.get(key)!r}, not {wanted[key]!r}: "
            "choose another folder or remove this one"
        )
    if not (out / EPISODES).exists():
        return {}
    return {(t.task_id, t.seed): t for t in read_trajectories(out / EPISODES)}


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise SpearError(f"{path} cannot be read: choose another folder or remove this one") from error
