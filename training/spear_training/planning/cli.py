"""``spear plan``: what a training step holds, and whether it fits into the memory of a device."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import find_free_memory
from spear_sandbox.console import Number, echo
from spear_sandbox.terminal import Console
from spear_training.cli import WORD

if TYPE_CHECKING:
    from spear_training.run.compose import Request

GPU_GIB = 80.0
"""GiB of a GPU, unless another size is given."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a training: of a step, and in bytes of each device, or rank of a CPU (None without a model)."""

    step: dict[str, float]
    """Its episodes, its rows (turns, in the layout ``per_turn``) and their tokens, and optimiser steps before replay.

    Lengths that were not given count as their maximum.
    """
    parameters: int | None
    update: dict[str, float] | None
    rollout: dict[str, float] | None
    cache_tokens: float | None
    device_bytes: float
    note: str
    """Choices of the launcher with which an update fits, or why none fits."""
    fits: bool


def make_plan(request: Request, given: dict[str, float], device_bytes: float) -> Plan:
    """Plan the training ``request``, whose data and model may be missing.

    ``given`` may have ``turns`` of an episode, and tokens of a row: ``prompt``, ``response``, and ``written`` of these.
    ``device_bytes`` are those of a GPU, or of the CPU that its ranks share.
    """
    from spear_training.algorithms.filters import count_kept
    from spear_training.planning.fitting import GPU_SHARE, fit_training
    from spear_training.planning.memory import find_architecture, size_memory, sum_bytes
    from spear_training.run.computing import measure_weights
    from spear_training.run.environments import count_turns
    from spear_training.run.launch import count_episodes, resolve_machine
    from spear_training.run.to_verl import to_verl
    from spear_training.step.minibatches import count_minibatches

    config = request.config
    config.check_together()
    train, rollout = config.train, config.rollout
    turns = count_turns(config.env) if config.env.layout is Layout.PER_TURN else 1
    prompt, response = (
        given.get("prompt", rollout.max_prompt_length),
        given.get("response", rollout.max_response_length),
    )
    episodes = train.batch_size * rollout.group_size
    rows = episodes * min(given.get("turns", turns), turns)
    kept = count_kept(config.filter.groups, train.batch_size) / train.batch_size
    mini_batch = train.mini_batch_size * rollout.group_size
    row_tokens = prompt + response
    step = {
        "episodes": episodes,
        "rows": rows,
        "row_tokens": row_tokens,
        "tokens": rows * row_tokens,
        "written": rows * min(given.get("written", response), response),
        "optimiser_steps": count_minibatches(rows * kept, mini_batch) * train.epochs,
    }
    if config.model.path is None:
        note = "memory is unknown without a model: add model.path=FOLDER"
        return Plan(step, None, None, None, None, device_bytes, note, True)
    model = find_architecture(config.model.path)
    config = resolve_machine(config, weights=measure_weights(Path(config.model.path)) or 2 * model.parameters)
    device_bytes = device_bytes / (config.cluster.gpus_per_node or 1) if config.on_cpu else device_bytes
    room = device_bytes if config.on_cpu else GPU_SHARE * device_bytes  # what `spear train` takes
    try:
        config, fit = fit_training(config, to_verl(config, Path("plan")), request.given, room)
        note, refused = fit.describe() if fit else "", False
    except SpearError as error:
        note, refused = str(error), True
    tokens = min(float(config.train.tokens_per_gpu), mini_batch * row_tokens / config.ranks)
    longest = config.longest_row
    validation = config.validation
    played = math.inf if validation.tasks is None else validation.tasks * validation.samples
    running = max(count_episodes(config), played)
    memory = size_memory(to_verl(config, Path("plan")), model, tokens, longest, running, device_bytes)
    short = memory.cache_tokens is not None and memory.cache_tokens < longest
    largest = max(sum_bytes(memory.update), sum_bytes(memory.rollout))
    update, generate = ({item.name: item.bytes for item in items} for items in (memory.update, memory.rollout))
    fits = not refused and not short and largest <= device_bytes
    return Plan(step, model.parameters, update, generate, memory.cache_tokens, device_bytes, note, fits)


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan as a table: sizes of a step, then memory while the policy is updated and while it generates."""
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in plan.step.items():
        table.add_row(name.replace("_", " "), f"{value:,.0f}")
    for title, items in (("memory of an update", plan.update), ("memory while generating", plan.rollout)):
        if items is None:
            continue
        total = sum(items.values())
        table.add_row()
        for name, size in items.items():
            table.add_row(f"  {name}", _bytes(size))
        fits = total <= plan.device_bytes
        verdict = "of" if fits else "does not fit into"
        table.add_row(title, f"{_bytes(total)} {verdict} {_bytes(plan.device_bytes)}", style=None if fits else "red")
    console.print(table)
    if plan.cache_tokens is not None:
        console.print(f"The cache of a replica holds {max(0.0, plan.cache_tokens):,.0f} tokens.")
    if plan.note:
        console.print(plan.note, highlight=False, soft_wrap=True)


def _bytes(value: float) -> str:
    return f"{value / 2**30:,.1f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:,.1f} MiB"


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.option("--turns", type=Number(1), help="Turns of an episode.")
@click.option("--prompt-tokens", "prompt", type=Number(1), help="Tokens of a row's prompt.")
@click.option("--response-tokens", "response", type=Number(1), help="Tokens of a row's response.")
@click.option("--written-tokens", "written", type=Number(1), help="Tokens of these by the policy.")
@click.option(
    "--device-memory",
    type=Number(0, min_open=True),
    help="GiB of a GPU, else 80; of a CPU, else what is free on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.argument("words", nargs=-1, metavar="[GROUP=CHOICE]... [FILE.yaml]... [KEY=VALUE]...", type=WORD)
def plan(
    device_memory: float | None,
    as_json: bool,
    words: tuple[str, ...],
    **given: float | None,
) -> None:
    """Print the rows and tokens of a training step, and whether it fits into the memory.

    The arguments are those of `spear train`. Neither data nor a model is needed. Lengths that are not given count as
    their maximum. Times are not predicted. The exit status is 1 where the training does not fit.

    \b
      spear plan preset=alfworld_qwen2.5_7b cluster=8gpu --turns 16 --prompt-tokens 900 --response-tokens 80
    """
    from spear_training.planning.fitting import CPU_SHARE
    from spear_training.run.compose import compose

    request = compose(words)
    known: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if device_memory is not None:
        room = device_memory * 2**30
    else:
        room = CPU_SHARE * find_free_memory() if request.config.on_cpu else GPU_GIB * 2**30
    made = make_plan(request, known, room)
    if as_json:
        echo(json.dumps(asdict(made), indent=1))
    else:
        print_plan(made, Console())
    if not made.fits:
        raise SystemExit(1)
