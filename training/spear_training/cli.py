"""``spear train`` and ``spear demo``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from spear_sandbox.console import echo
from spear_sandbox.terminal import Console
from spear_training.overrides import CONFIG_DIR_OPTION, OVERRIDE


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.option("--out", type=click.Path(path_type=Path), help="Run folder: checkpoints, metrics, curves, log.")
@click.option("--list", "list_only", is_flag=True, help="Print the choices of each group and stop.")
@click.option("--print-config", is_flag=True, help="Print the composed configuration and stop.")
@CONFIG_DIR_OPTION
@click.argument("overrides", nargs=-1, metavar="[GROUP=CHOICE]... [KEY=VALUE]...", type=OVERRIDE)
def train(
    out: Path | None, list_only: bool, print_config: bool, config_dir: Path | None, overrides: tuple[str, ...]
) -> None:
    """Train a policy with SPEAR or another algorithm, through verl.

    Groups are preset (an experiment), algorithm, model, cluster and environment. KEY=VALUE changes any key of verl's
    configuration or of the spear node, as in Hydra:

    \b
      spear train preset=demo actor_rollout_ref.model.path=runs/demo/warmstart spear.seed=1 --out runs/first
      spear train preset=alfworld_qwen2.5_7b algorithm=grpo cluster=8gpu --out runs/grpo
      spear train preset=alfworld_qwen2.5_7b model=tiny --out runs/dry     # two real steps on a CPU

    The same command resumes a stopped run.
    """
    if list_only:
        from spear_training.choices import GROUPS, list_choices

        console = Console()
        for group in GROUPS:
            console.print(group, style="bold", highlight=False)
            for name, title in list_choices(group, config_dir).items():
                console.print(Text.assemble(f"  {name:24} ", (title, "dim")), soft_wrap=True)
        console.print("A preset of the paper with the values of the authors' code: preset=official/NAME")
        return
    from omegaconf import OmegaConf

    from spear_training.launch import compose_config

    if out is None and not print_config:
        raise click.UsageError("name a run folder: --out runs/NAME")
    if print_config:
        config = compose_config(overrides, out or Path("runs/run"), check=False, config_dir=config_dir)
        echo(OmegaConf.to_yaml(config))
        return
    assert out is not None
    from spear_training.runs import run_training

    run_training(overrides, out, Console(), config_dir)


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/demo"))
@click.option("--steps", type=click.IntRange(1), default=60, envvar="SPEAR_DEMO_STEPS", help="Training steps.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the training.")
def demo(out: Path, steps: int, seed: int) -> None:
    """Train a small agent on Sokoban from start to finish, on a CPU, without a download.

    Warm start from a noisy expert, SPEAR training through verl, evaluation before and after on the test panel, curves
    and an animated level. The same command resumes it.

    \b
      spear demo
      spear demo --steps 2 --out runs/trial
    """
    from spear_training.demo import run_demo

    run_demo(out, steps=steps, seed=seed, console=Console())
