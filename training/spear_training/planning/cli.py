"""``spear plan``."""

from __future__ import annotations

from pathlib import Path

import click

from spear_envs.core.errors import SpearError
from spear_sandbox.console import echo
from spear_sandbox.terminal import Console
from spear_sandbox.web.options import Number
from spear_training.overrides import CONFIG_DIR_OPTION, OVERRIDE


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.option("--turns", type=Number(1), help="Turns of an episode.")
@click.option("--prompt-tokens", "prompt", type=Number(1), help="Tokens of a row's prompt.")
@click.option("--response-tokens", "response", type=Number(1), help="Tokens of a row's response.")
@click.option("--written-tokens", "written", type=Number(1), help="Tokens of these by the policy.")
@click.option("--positive", type=Number(0, 1), help="Share of rows of positive advantage, else 0.5.")
@click.option(
    "--like", type=click.Path(path_type=Path, exists=True), help="Take these from the metrics in a training's folder."
)
@click.option(
    "--device-memory",
    type=Number(0, min_open=True),
    help="GiB of a GPU, else 80; of a CPU, else what is free on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@CONFIG_DIR_OPTION
@click.argument("overrides", nargs=-1, metavar="[GROUP=CHOICE]... [KEY=VALUE]...", type=OVERRIDE)
def plan(
    like: Path | None,
    device_memory: float | None,
    as_json: bool,
    config_dir: Path | None,
    overrides: tuple[str, ...],
    **given: float | None,
) -> None:
    """Print the sizes of a training with their formulas: rows, tokens, optimiser steps, replay, memory.

    The arguments are those of `spear train`. Neither data nor a model is needed. Unknown lengths count as their maximum
    unless they are given or taken from another training. Times are not predicted. The exit status is 1 where the
    training does not fit.

    \b
      spear plan preset=alfworld_qwen2.5_7b cluster=8gpu --turns 16 --prompt-tokens 900 --response-tokens 80
      spear plan preset=demo actor_rollout_ref.model.path=runs/demo/warmstart --like runs/demo/train
    """
    import json

    from spear_agents.metrics import read_history
    from spear_envs.core.memory import find_free_memory
    from spear_training.launch import compose_config
    from spear_training.planning.fitting import CPU_SHARE
    from spear_training.planning.memory import GIB
    from spear_training.planning.report import make_plan, print_plan
    from spear_training.planning.step import Texts

    measured = None
    if like is not None:
        history = read_history(like)
        if not any("tokens/prompt" in record for record in history):
            raise SpearError(f"{like} lacks metrics of a training step: name a folder of `spear train --out`")
        measured = Texts.measure(history)
    config = compose_config(overrides, Path("plan"), check=False, config_dir=config_dir)
    known = {key: value for key, value in given.items() if value is not None}
    if device_memory is not None:
        room = device_memory * GIB
    else:
        room = CPU_SHARE * find_free_memory() if config.trainer.device == "cpu" else 80.0 * GIB
    made = make_plan(config, known, measured, room, overrides)
    if as_json:
        echo(json.dumps(made.to_json(), indent=1))
    else:
        print_plan(made, Console())
    if not made.fits:
        raise SystemExit(1)
