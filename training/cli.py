"""``spear train`` and ``spear demo``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

RESUME_HINT = "the same command resumes it"


@contextmanager
def show_progress(console: Console, total: int) -> Iterator[Any]:
    """A progress bar over training steps; yields the observer of :func:`training.supervise.run_training`."""
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


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.option(
    "--config",
    "name",
    default="cpu",
    show_default=True,
    help="A configuration of training/config: spear (GPU), cpu or demo.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Run folder: checkpoints, metrics, curves, log.")
@click.option("--print-config", is_flag=True, help="Print the composed configuration and stop.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(name: str, out: Path | None, print_config: bool, overrides: tuple[str, ...]) -> None:
    """Train a policy with SPEAR, through verl.

    KEY=VALUE changes any key of verl's configuration or of the spear node, as in Hydra:

      spear train --config demo --out runs/first actor_rollout_ref.model.path=runs/demo/warmstart spear.seed=1

    The same command resumes a run that was stopped.
    """
    from omegaconf import OmegaConf

    from training.launch import compose_config

    if out is None and not print_config:
        raise click.UsageError("name a run folder: --out runs/NAME")
    if print_config:
        config = compose_config(name, overrides, out or Path("runs/run"), check=False)
        click.echo(OmegaConf.to_yaml(config))
        return
    assert out is not None
    run(name, overrides, out, Console())


def run(name: str, overrides: tuple[str, ...], out: Path, console: Console) -> None:
    """Compose, check, train with a progress bar, and draw the curves.

    Raises:
        SpearError: anything a user can mend.
    """
    from agents.files import explain_unwritable
    from training.history import read_history
    from training.launch import compose_config, prepare_run
    from training.plots import plot_curves
    from training.supervise import run_training

    config = compose_config(name, overrides, out)
    total = int(config.trainer.total_training_steps)
    checkpoint = prepare_run(config, out)
    if checkpoint is not None and checkpoint >= total:
        console.print(f"{out} has its {total} steps already")
    else:
        if checkpoint is not None:
            console.print(f"resuming {out} after step {checkpoint}")
        try:
            with show_progress(console, total) as observe:
                run_training(out, config.trainer.device, observe)
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


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True)
@click.option(
    "--steps", type=click.IntRange(1), default=40, show_default=True, envvar="SPEAR_DEMO_STEPS", help="Training steps."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the training.")
def demo(out: Path, steps: int, seed: int) -> None:
    """Train a small agent on Sokoban from start to finish, on a CPU, without a download.

    Warm start from a noisy expert, SPEAR training through verl, evaluation before and after on the whole test panel,
    curves and an animated level. Stopped anywhere, the same command goes on.
    """
    from training.demo import run_demo

    run_demo(out, steps=steps, seed=seed, console=Console())
