"""A training from overrides to curves, for ``spear train``, the demo and the benchmark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from spear_agents.evaluation.records import PANELS, read_history
from spear_envs.core.errors import SpearError
from spear_envs.data.files import draft_file, write_json
from spear_sandbox.terminal import Console, Progress
from spear_training.run.compose import Request, compose
from spear_training.run.computing import count_threads, measure_weights
from spear_training.run.config import RunConfig, describe_staleness, flatten
from spear_training.run.inputs import TASKS_FILE, describe_inputs
from spear_training.run.launch import (
    CHANGEABLE,
    CONFIG_FILE,
    POLICY,
    describe_ranks,
    describe_void,
    describe_workers,
    prepare_run,
    prepare_training,
    publish_run,
    read_run,
)
from spear_training.run.review import watch_metrics
from spear_training.run.supervise import Observer, hold_run, supervise_training

if TYPE_CHECKING:
    from spear_training.warmstart import WarmStartSettings
    from spear_training.warmstart.vision import TinyVisionSettings


RESUME_HINT = "the same command resumes it"
CURVES = "curves.png"
NOT_CUT = ("model.",)
"""Settings that a tiny policy changes without reducing anything."""
Reading = tuple[int, str]
"""Progress of a training: its last step and a few figures."""


@contextmanager
def show_progress(
    console: Console, total: int, start: str, read: Callable[[list[dict[str, Any]]], Reading | None]
) -> Iterator[Observer]:
    """Show a training's progress; yield the observer of :func:`spear_training.run.supervise.supervise_training`.

    ``start`` is the text before the first step; ``read`` reads the progress from the history, None before that step.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),  # the only column that shrinks on a narrow terminal
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console, announces=True) as progress:
        task = progress.add_task(start, total=total, figures="")

        def observe(history: list[dict[str, Any]]) -> None:
            reading = read(history)
            if reading is not None:
                progress.update(task, description="training", completed=reading[0], figures=reading[1])

        yield observe


def read_progress(history: list[dict[str, Any]]) -> Reading | None:
    """Read the progress of a training with SPEAR."""
    steps = [record for record in history if "training/global_step" in record]
    if not steps:
        return None
    last = steps[-1]
    figures = f"success {last.get('success/all') or 0:.0%}"
    valid = [record["val/success/all"] for record in history if record.get("val/success/all") is not None]
    if valid:
        figures += f" · valid {valid[-1]:.0%}"
    return last["step"], f"{figures} · {last.get('perf/step_seconds') or 0:.1f} s/step"


def make_policy(settings: WarmStartSettings | TinyVisionSettings, folder: Path, console: Console) -> None:
    """Make a tiny policy with a progress bar, replacing ``folder``. Raises SpearError for an invalid setting."""
    from spear_training.warmstart import WarmStartSettings, train_policy  # imports torch and transformers
    from spear_training.warmstart.vision import make_tiny_vision_policy

    columns = (TextColumn("    {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, announces=True) as progress:
        tasks: dict[str, Any] = {}

        def observe(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        if isinstance(settings, WarmStartSettings):
            train_policy(settings, folder, observer=observe, overwrite=folder.exists())
        else:
            make_tiny_vision_policy(settings, folder, lambda done, total: observe("training steps", done, total))


def choose_warm_start(config: RunConfig) -> WarmStartSettings | TinyVisionSettings:
    """Return the settings of the policy that a training makes first: the environment's recipe, with the training's
    prompts.

    Raises SettingsError if ``model.warm_start`` or ``model.vision_start`` is invalid.
    """
    from spear_training.warmstart import choose_recipe  # imports torch and transformers
    from spear_training.warmstart.vision import TinyVisionSettings

    env, model = config.env, config.model
    played: dict[str, Any] = {"env_kwargs": env.kwargs, "template": env.template}
    if model.vision_start is not None:
        return TinyVisionSettings(env.id, **{**played, **model.vision_start})
    played |= {"layout": env.layout, "history": env.history}
    return replace(choose_recipe(env.id), **{**played, **(model.warm_start or {})})


def list_cuts(words: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Return the settings changed by ``model=tiny`` or ``tiny_vl`` in ``words``: key, the preset's value, the value
    here.
    """
    without = [word for word in words if not word.startswith("model=")]
    before, after = (dict(flatten(compose(chosen).config.to_mapping())) for chosen in (without, words))
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(NOT_CUT)
    ]


def show_cuts(words: Sequence[str], console: Console) -> None:
    """Print what this dry run reduces."""
    table = Table(title="Dry run: reduced settings (all others are the preset's)", title_justify="left", box=None)
    for column in ("setting", "preset", "here"):
        table.add_column(column)
    for key, before, after in list_cuts(words):
        table.add_row(key, *("–" if value is None else str(value) for value in (before, after)))
    console.print(table)


def run_training(words: Sequence[str], out: Path, console: Console) -> None:
    """Compose, check, train with a progress bar, and draw the curves; make the policy first if needed."""
    with hold_run(out):
        _run_training(compose(words), words, out, console)


def _run_training(request: Request, words: Sequence[str], out: Path, console: Console) -> None:
    earlier = read_run(out) if (out / CONFIG_FILE).is_file() else None
    training = prepare_training(request, out, console)
    config, total = training.config, training.config.train.steps
    start = choose_warm_start(config) if config.model.is_made else None
    checkpoint = prepare_run(training, out, console, locked=True)
    made_for = choose_warm_start(earlier) if earlier is not None and earlier.model.is_made else start
    if checkpoint is None and start is not None and start != made_for:  # of a run that had no checkpoint yet
        shutil.rmtree(out / POLICY, ignore_errors=True)
    is_done = checkpoint is not None and checkpoint >= total and _is_logged(config, out, checkpoint)
    if is_done and not config.validation.only:
        console.print(f"{out} has its {total} steps already")
        if not (out / CURVES).is_file():
            _draw_curves(out, config, console)
    else:
        if checkpoint is not None:
            console.print(f"resuming {out} after step {checkpoint}")
        if start is not None:
            show_cuts(words, console)
            own = (out / POLICY).resolve()
            if own == Path(str(config.model.path)) and not (own / "config.json").is_file():
                make_policy(start, out / POLICY, console)
                inputs = describe_inputs(config, training.environment, changeable=CHANGEABLE)
                write_json(out / TASKS_FILE, inputs)
        threads = count_threads(measure_weights(Path(str(config.model.path))), config.ranks)
        console.print(describe_workers(config), soft_wrap=True, highlight=False)
        rollout = config.rollout
        for line in (
            describe_ranks(config, threads) if config.on_cpu else None,
            describe_void(config, training.environment.max_turns),
            describe_staleness(rollout.staleness, rollout.correction) if rollout.staleness else None,
            training.fit.describe() if training.fit is not None else None,
        ):
            if line:
                console.print(line, soft_wrap=True, highlight=False)
        try:
            with show_progress(console, total, "starting Ray and verl (a minute or two)", read_progress) as observe:
                watched = watch_metrics(observe, config.algorithm, console)
                supervise_training(out, config.cluster.device.value, watched, threads=threads, locked=True)
            publish_run(config, out, console)
        except KeyboardInterrupt:
            steps = [record["step"] for record in read_history(out)]
            console.print(f"stopped after step {max(steps, default=0)}; {RESUME_HINT} from the last checkpoint")
            raise
        finally:
            _draw_curves(out, config, console)


def _is_logged(config: RunConfig, out: Path, step: int) -> bool:
    """Return whether the metrics of a saved step are there; True if the run writes none into its folder."""
    steps = (record["step"] for record in read_history(out) if "training/global_step" in record)
    return "file" not in config.log.to or step in steps


def _draw_curves(out: Path, config: RunConfig, console: Console) -> None:
    """Draw the curves of a run that has metrics; an error is printed, since it must not hide the cause of a stop."""
    if any("training/global_step" in record for record in read_history(out)):
        try:
            picture = plot_curves(out, out / CURVES, title=f"{out.name}: {config.env.id}")
        except SpearError as error:
            console.print(str(error))
        else:
            console.print(f"curves: {picture}")


SMOOTH = 5
"""Training success depends on the tasks of a step: a running mean over this many steps is drawn too."""


def plot_curves(out: str | Path, path: str | Path, *, title: str = "") -> Path:
    """Draw the curves of run folder ``out`` into the picture ``path`` (its suffix sets the format).

    Raises ValueError if the run does not have metrics yet, SpearError if the picture cannot be written.
    """
    history = read_history(out)
    if not any("training/global_step" in record for record in history):
        raise ValueError(f"{out} has no training step yet")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for axis, (name, series) in zip(axes.flat, PANELS, strict=True):
        for number, (key, label) in enumerate(series):
            points = [(record["step"], record[key]) for record in history if record.get(key) is not None]
            if not points:
                continue
            steps, values = np.asarray(points, dtype=float).T
            colour = f"C{number}"
            if key == "success/all":
                axis.plot(steps, values, ".", color=colour, alpha=0.35, markersize=4)
                axis.plot(steps, smooth(values), color=colour, label=f"{label}, mean of {SMOOTH}")
            else:
                sparse = key.startswith("val/") or key == "replay/drawn"
                axis.plot(steps, values, "o-" if sparse else "-", color=colour, markersize=4, label=label)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
        if name == "success":
            axis.set_ylim(bottom=0)
    if title:
        figure.suptitle(title, fontsize=11)
    path = Path(path)
    with draft_file(path) as draft:
        figure.savefig(draft, dpi=130, format=path.suffix[1:])
    pyplot.close(figure)
    return path


def smooth(values: np.ndarray, steps: int = SMOOTH) -> np.ndarray:
    """Return the means over the last ``steps`` values [N], over fewer at the beginning."""
    return np.asarray([values[max(0, i - steps + 1) : i + 1].mean() for i in range(len(values))])
