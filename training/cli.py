"""``spear train`` and ``spear demo``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.option(
    "--config",
    "name",
    default="cpu",
    show_default=True,
    help="A configuration of training/config: spear (GPU), cpu, demo, alfworld, code, search or webshop.",
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
    from training.runs import run_training

    run_training(name, overrides, out, Console())


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
