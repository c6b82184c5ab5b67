"""Resumable evaluation of a policy on a fixed list of tasks, and the comparison of two evaluations."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

import spear_envs
from spear_agents.comparison.statistics import Comparison, Metric, Part, compare_trajectories, summarise
from spear_agents.comparison.tables import PART_HEADINGS, Cell, describe_part, format_latex, make_cells
from spear_agents.engines.base import AgentFaultKind, EngineFaultKind, Generation
from spear_agents.evaluation.baselines import Method, Reflexion
from spear_agents.evaluation.records import (
    EPISODES,
    NO_USAGE,
    PROGRESS,
    EpisodeLog,
    Key,
    Usage,
    describe_versions,
    open_log,
    read_last,
    sum_usage,
)
from spear_agents.evaluation.settings import EngineKind, EvalSettings, hash_settings, open_policy
from spear_agents.models import name_model
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import Overlong
from spear_agents.play.rollout import Job, Listening, Play, play_many, run_blocking
from spear_agents.play.trajectory import Trajectory
from spear_envs.adapters.conversation import find_tools_template
from spear_envs.core.errors import SpearError, UnknownTaskError
from spear_envs.core.making import find_splits, make_env
from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.tasks import choose_subset
from spear_envs.data.files import write_json

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "summary.json"
FAULTS_IN_A_ROW = 5
"""Consecutive episodes cut short by the engine after which a run gives up."""
EPISODE_COLUMNS = (
    *("task_id", "seed", "trial", "subtask", "instruction"),
    *("won", "score", "reward", "tool_calls", "fault"),
)
"""Fields of a trajectory that a table of episodes copies."""
_OF_PLAYER = {kind.value for kind in (*EngineFaultKind, AgentFaultKind.FAILED, AgentFaultKind.TIMEOUT)}
"""Faults of the player, likely to recur in the next episode."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The figures of an evaluation and its episodes.

    ``identity`` is what makes it this evaluation (:meth:`~spear_agents.evaluation.settings.EvalSettings.identify`).
    ``spent`` is what each job cost, by task and seed, in all its trials and with those that a fault cut short.
    """

    settings: EvalSettings
    identity: Mapping[str, Any]
    overall: Part
    subtasks: Mapping[str, Part]
    trajectories: Sequence[Trajectory]
    seconds: float
    spent: Mapping[Key, Usage] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the task set."""
        return str(self.identity["fingerprint"])

    @property
    def cells(self) -> list[Cell]:
        """The columns of the paper's table."""
        return make_cells(self.settings.env_id, self.settings.env_kwargs, self.overall, self.subtasks)

    @property
    def usage(self) -> Usage:
        """Tokens and costs of all episodes, earlier trials and episodes cut short by a fault among them."""
        return sum((self._find_usage(trajectory) for trajectory in self.trajectories), NO_USAGE)

    def _find_usage(self, trajectory: Trajectory) -> Usage:
        """Return what the job of an episode cost."""
        return self.spent.get((trajectory.task_id, trajectory.seed)) or sum_usage([trajectory])

    @property
    def row_name(self) -> str:
        """Name of the evaluation in a table."""
        settings = self.settings
        model = name_model(settings.model) if settings.model else settings.engine.value
        return model if settings.method is Method.PLAIN else f"{model} {settings.method.value}"

    def __repr__(self) -> str:
        won = dict(zip(PART_HEADINGS, describe_part(self.overall), strict=True))
        return (
            f"Evaluation({self.settings.env_id} {self.settings.split}, {self.row_name}: won {won['won %']} % "
            f"[{won['CI95']}] of {won['tasks']} tasks, {won['episodes']} episodes, {won['faults']} faults)"
        )

    def _repr_html_(self) -> str:
        """Return the figures by subtask, for notebooks."""
        settings = self.settings
        title = f"{settings.env_id} {settings.split}, {self.row_name}, temperature {settings.temperature:g}"
        rows = [(name, part) for name, part in self.subtasks.items()] + [("all", self.overall)]
        lines = [_write_row("th", ["subtask", *PART_HEADINGS])]
        lines += [_write_row("td", [name, *describe_part(part)]) for name, part in rows]
        return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"

    def to_pandas(self) -> DataFrame:
        """Return a row for each episode, in the order of the tasks. Raises SpearError if pandas is not installed."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise SpearError("tables of episodes need pandas: pip install pandas") from error
        settings = self.settings
        model = name_model(settings.model) if settings.model else settings.engine.value
        about = {"environment": settings.env_id, "model": model, "method": settings.method.value}
        return DataFrame([about | _describe_episode(each, self._find_usage(each)) for each in self.trajectories])

    def to_json(self, baselines: Mapping[str, Part] | None = None) -> dict[str, Any]:
        """Return the summary as plain values."""
        summary = {
            "settings": self.settings.to_json(),
            "fingerprint": self.fingerprint,
            "settings_hash": hash_settings(self.identity),
            "model_digest": self.identity.get("model_digest"),
            "seeds": sorted({trajectory.seed for trajectory in self.trajectories}),
            "overall": self.overall.to_json(),
            "subtasks": {name: part.to_json() for name, part in self.subtasks.items()},
            "table": [cell.to_json() for cell in self.cells],
            "latex": format_latex(self.row_name, self.cells),
            "by_trial": [
                sum(trajectory.won and trajectory.trial <= number for trajectory in self.trajectories)
                for number in range(1, self.settings.trials + 1)
            ],
            "usage": self.usage.to_json(),
            "seconds": round(self.seconds, 2),
            "spear_envs": spear_envs.__version__,
            "versions": describe_versions(),
        }
        if baselines:
            summary["baselines"] = {name: part.to_json() for name, part in baselines.items()}
        return summary


def _write_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _describe_episode(trajectory: Trajectory, usage: Usage) -> dict[str, Any]:
    """Return an episode without its turns, in plain values; ``usage`` is what its job cost."""
    return {
        **{name: getattr(trajectory, name) for name in EPISODE_COLUMNS},
        "stop": trajectory.stop.value,
        "turns": len(trajectory.turns),
        "format_ok": trajectory.format_ok,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "requests": usage.requests,
        "cost": usage.cost,
        "seconds": trajectory.seconds,
        "last_response": trajectory.turns[-1].response if trajectory.turns else "",
    }


class StoppedError(KeyboardInterrupt):
    """Ctrl-C; says what is kept."""

    def __init__(self, played: int, total: int, out: str | Path | None) -> None:
        kept = "nothing is kept without --out" if out is None else f"kept in {out}; the same command resumes"
        super().__init__(f"Interrupted after {played:,} of {total:,} episodes: {kept}.")


Observer = Callable[[int, int, Trajectory | None], None]
"""Follows an evaluation: gets the episodes done, their total, and the last one; at first what was played before."""


def choose_tasks(env: gym.Env[Any, Any], selection: str) -> list[str]:
    """Return the task ids of ``"all"``, of N with each subtask in its share, or of a list of ids.

    Raises UnknownTaskError or SpearError.
    """
    tasks: Any = env.unwrapped.tasks  # type: ignore[attr-defined]
    if selection == "all":
        if not tasks.bounded:
            raise SpearError(f"the split {tasks.split} has {len(tasks):,} generated tasks: ask for a number of them")
        return [task.id for task in tasks]
    if re.fullmatch(r"[0-9]{1,18}", selection):
        count = int(selection)
        if not 1 <= count <= len(tasks):
            raise SpearError(f"tasks={count}: the split {tasks.split} has {len(tasks):,} tasks")
        return [tasks[i].id for i in choose_subset(tasks, count)]
    try:
        return list(dict.fromkeys(tasks.get(name.strip()).id for name in selection.split(",")))
    except UnknownTaskError as error:
        raise UnknownTaskError(f"{error} Give a number of tasks, all, or ids with commas between.") from None


def choose_template(env: gym.Env[Any, Any], name: str) -> Any:
    """Return a prompt template of the environment. Raises SpearError if it has none of this name."""
    templates: Mapping[str, Any] = env.unwrapped.templates  # type: ignore[attr-defined]
    if name not in templates:
        raise SpearError(f"no prompt template {name!r}: this environment has {', '.join(sorted(templates))}")
    return templates[name]


@dataclass(frozen=True)
class Prepared:
    """Settings with the defaults of environment and engine filled in, and the parts of the environment needed."""

    settings: EvalSettings
    task_ids: list[str]
    fingerprint: str
    template: PromptTemplate
    parser: ResponseParser


def prepare(settings: EvalSettings) -> Prepared:
    """Look at the environment of ``settings``. Raises SpearError for what does not exist or is not available."""
    split = settings.split or find_splits(settings.env_id)[-1]
    with closing(make_env(settings.env_id, split, settings.env_kwargs)) as env:
        settings = settings.resolve(split, env.templates)
        template = choose_template(env, settings.template or "")
        if settings.server is not None and settings.server.tools:
            core: Any = env.unwrapped
            template = find_tools_template(core)
        return Prepared(settings, choose_tasks(env, settings.tasks), env.tasks.fingerprint, template, env.parser)


def run_evaluation(
    settings: EvalSettings,
    out: str | Path | None = None,
    *,
    concurrency: int | None = None,
    deterministic: bool = False,
    mixed_models: bool = False,
    observer: Observer | None = None,
    on_response: Callable[[Generation], None] | None = None,
) -> Evaluation:
    """Play the tasks of ``settings`` and summarise the results.

    With ``out`` every episode is appended to ``out/episodes.jsonl`` as it ends and the figures go to
    ``out/summary.json``; run again, it plays only what is missing or was cut short by a fault. The default of
    ``concurrency``, episodes at a time, is :meth:`~spear_agents.evaluation.settings.EvalSettings.choose_concurrency`;
    with ``deterministic`` the responses of a local model do not depend on it. A server that answers as another model
    than before stops the run, except with ``mixed_models``. ``observer`` follows the episodes that end, and
    ``on_response`` gets each response as soon as it is written.

    Raises SpearError for a setting that does not exist, a model that cannot be loaded, a folder that cannot be written
    or holds an evaluation with other settings, and an engine that keeps failing.
    """
    concurrency = settings.choose_concurrency(concurrency)
    prepared = prepare(settings)
    settings, jobs = prepared.settings, prepared.settings.jobs(prepared.task_ids)
    start = time.monotonic()
    with ExitStack() as stack:
        policy = open_policy(
            settings, prepared.template, prepared.parser, stack, concurrency=concurrency, deterministic=deterministic
        )
        settings = policy.settings
        identity = settings.identify(prepared.fingerprint)
        log = EpisodeLog(mixed_models=mixed_models)
        if out is not None:
            about = settings.env_id, prepared.fingerprint
            opened = open_log(Path(out) / EPISODES, *about, identity=identity, mixed_models=mixed_models)
            log = stack.enter_context(opened)
        progress = _Progress(log, jobs, settings.trials, observer)
        if out is not None:
            write_json(Path(out) / PROGRESS, {"planned": len(jobs), "before": len(progress.played)})
            stack.callback((Path(out) / PROGRESS).unlink, missing_ok=True)
        play: Play = play_episode
        if settings.method is Method.REFLEXION:
            play = Reflexion(settings.trials, earlier=progress.trials, on_trial=log.write)

        async def play_all() -> None:
            async with AsyncExitStack() as closing:
                closing.push_async_callback(policy.aclose)
                player = play
                if settings.agent is not None:
                    from spear_agents.gateway.programs import open_program  # FastAPI is needed here only

                    player = await closing.enter_async_context(open_program(settings.agent, settings.agent_timeout))
                if on_response is not None:
                    player = Listening(player, on_response)
                await play_many(
                    progress.missing,
                    make_env=lambda: policy.wrap_env(make_env(settings.env_id, settings.split, settings.env_kwargs)),
                    engine_for=policy.engine_for,
                    prompts=policy.prompts,
                    sampling=settings.sampling(),
                    env_id=settings.env_id,
                    concurrency=concurrency,
                    on_done=progress.record,
                    play=player,
                )

        try:
            run_blocking(play_all())
        except KeyboardInterrupt:
            raise StoppedError(len(progress.played), len(jobs), out) from None
    trajectories = [progress.played[job.task_id, job.seed] for job in jobs]
    if all(trajectory.fault in _OF_PLAYER for trajectory in trajectories):
        fault, detail = str(trajectories[0].fault), trajectories[0].detail
        raise SpearError(f"no episode could be played ({fault}: {detail})")
    overall, subtasks = summarise(trajectories)
    evaluation = Evaluation(settings, identity, overall, subtasks, trajectories, time.monotonic() - start, log.spent)
    if out is not None:
        write_summary(out, evaluation)
    return evaluation


class _Progress:
    """Finished and missing jobs of an evaluation."""

    def __init__(self, log: EpisodeLog, jobs: Sequence[Job], trials: int, observer: Observer | None) -> None:
        self._log = log
        self._observer = observer
        self._total = len(jobs)
        self._faults = 0
        last = {key: found[-1] for key, found in log.earlier.items()}
        final = {key: t for key, t in last.items() if t.won or t.reflection is None or t.trial >= trials}
        self.trials = {key: found for key, found in log.earlier.items() if key not in final}
        """Failed trials of jobs that are not finished."""
        self.played = {key: final[key] for job in jobs if (key := (job.task_id, job.seed)) in final}
        self.missing = [job for job in jobs if (job.task_id, job.seed) not in self.played]
        if observer is not None:
            observer(len(self.played), self._total, None)

    def record(self, trajectory: Trajectory) -> None:
        """Keep an episode. Raises SpearError if the engine has failed several times in a row."""
        self._log.write(trajectory)
        self.played[trajectory.task_id, trajectory.seed] = trajectory
        if self._observer is not None:
            self._observer(len(self.played), self._total, trajectory)
        self._faults = self._faults + 1 if trajectory.fault in _OF_PLAYER else 0
        if self._faults == FAULTS_IN_A_ROW:
            text = f"the engine failed {self._faults} episodes in a row ({trajectory.fault}: {trajectory.detail})"
            raise SpearError(f"{text}; with --out the same command resumes")


def write_summary(out: str | Path, evaluation: Evaluation, baselines: Mapping[str, Part] | None = None) -> None:
    """Write ``out/summary.json``. Raises SpearError if it cannot be written."""
    write_json(Path(out) / SUMMARY, evaluation.to_json(baselines))


def compare_runs(before: str | Path, after: str | Path, metric: Metric = Metric.SUCCESS) -> Comparison:
    """Compare two folders of :func:`run_evaluation`, task by task. Raises SpearError if they do not match."""
    return compare_trajectories(read_last(Path(before) / EPISODES), read_last(Path(after) / EPISODES), metric)


def play_baseline(settings: EvalSettings, kind: EngineKind, *, concurrency: int | None = None) -> Part:
    """Return the figures of a scripted player on the tasks and samples of another evaluation."""
    plain = replace(
        settings,
        engine=kind,
        model=None,
        server=None,
        dtype=None,
        vllm=None,
        method=Method.PLAIN,
        trials=1,
        agent=None,
        thoughts=False,
        layout=None,
        template=None,
        template_kwargs={},
        max_prompt_tokens=None,
        max_row_tokens=None,
        overlong=Overlong.END,
        panel=None,
    )
    return run_evaluation(plain, concurrency=concurrency).overall
