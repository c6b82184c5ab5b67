"""A training from overrides to curves, as ``spear train``, the demo and the benchmark have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agents.files import explain_unwritable
from agents.metrics import read_history
from training.dry_run import choose_warm_start, show_cuts
from training.launch import POLICY, compose_config, prepare_run
from training.plots import plot_curves
from training.supervise import Observer, supervise_training

if TYPE_CHECKING:
    from training.warmstart import WarmStartSettings

RESUME_HINT = "the same command resumes it"


@contextmanager
def show_progress(console: Console, total: int) -> Iterator[Observer]:
    """A progress bar over training steps; yields the observer of :func:`training.supervise.supervise_training`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting Ray and verl", total=total, figures="")

        def observe(history: list[dict[str, Any]]) -> None:
            steps = [record for record in history if "training/global_step" in record]
            if not steps:
                return
            last = steps[-1]
            figures = f"success {last.get('success/all', 0):.0%}"
            valid = [record["val/success/all"] for record in history if "val/success/all" in record]
            if valid:
                figures += f" · valid {valid[-1]:.0%}"
            # What is not finite is null in the metrics file; a step without a valid episode has no entropy at all.
            figures += (
                f" · entropy {last.get('entropy/token-mean') or 0:.2f} · {last['perf/step_seconds']:.1f} s a step"
            )
            progress.update(task, description="training", completed=last["step"], figures=figures)

        yield observe


def make_policy(settings: WarmStartSettings, folder: Path, console: Console) -> None:
    """Make a tiny policy with a progress bar, in the place of what ``folder`` holds.

    Raises:
        SpearError: a setting without a valid value, or ``folder`` cannot be written.
    """
    from training.warmstart import train_policy  # imports torch and transformers

    columns = (TextColumn("    {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def observe(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        train_policy(settings, folder, observer=observe, overwrite=folder.exists())


def run_training(overrides: tuple[str, ...], out: Path, console: Console) -> None:
    """Compose, check, train with a progress bar, and draw the curves; make the policy first where there is none.

    Raises:
        SpearError: anything a user can mend.
    """
    config = compose_config(overrides, out)
    total = int(config.trainer.total_training_steps)
    checkpoint = prepare_run(config, out)
    if checkpoint is not None and checkpoint >= total:
        console.print(f"{out} has its {total} steps already")
    else:
        if checkpoint is not None:
            console.print(f"resuming {out} after step {checkpoint}")
        if config.spear.warm_start is not None:
            show_cuts(overrides, console)
            if not (out / POLICY / "config.json").is_file():
                make_policy(choose_warm_start(config), out / POLICY, console)
        try:
            with show_progress(console, total) as observe:
                supervise_training(out, config.trainer.device, observe)
        except KeyboardInterrupt:
            steps = [record["step"] for record in read_history(out)]
            console.print(f"stopped after step {max(steps, default=0)}; {RESUME_HINT} from the last checkpoint")
            raise
        finally:
            if any("training/global_step" in record for record in read_history(out)):
                try:
                    picture = plot_curves(out, out / "curves.png", title=f"{out.name}: {config.spear.env.id}")
                except OSError as error:  # must not hide why the training stopped
                    console.print(str(explain_unwritable(out / "curves.png", error)))
                else:
                    console.print(f"curves: {picture}")
