"""``spear plan``: the sizes of a training before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from spear_agents.prompting import PromptBuilder
from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_creator
from spear_envs.core.prompts import DefaultTemplate
from spear_sandbox.terminal import Console
from spear_training.environments import count_turns
from spear_training.guidance import RunShape
from spear_training.planning.architecture import find_architecture, find_folder
from spear_training.planning.fitting import fit_training
from spear_training.planning.memory import GIB, DeviceMemory, size_memory, sum_bytes
from spear_training.planning.step import StepSizes, Texts, size_step
from spear_training.precision import measure_weights, resolve_dtype
from spear_training.settings import RunSettings
from spear_training.sizing import check_whole_numbers


@dataclass(frozen=True)
class Plan:
    """Sizes of a training: of its steps, and of the memory on each device (None without a model)."""

    shape: RunShape
    texts: Texts
    step: StepSizes
    parameters: int | None
    memory: DeviceMemory | None
    device_bytes: float
    choice: str = ""
    """The launcher's choice for an update to fit, or its error."""
    fits: bool = True
    """Whether everything fits into the device, as far as it is known."""
    rewrites: bool | None = None
    """Whether the chat template makes a row of each turn of a conversation; None without a tokenizer."""

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, sums included."""
        plain = asdict(self)
        plain["step"]["tokens"] = self.step.tokens
        if self.memory is not None:
            sums = {"update_bytes": sum_bytes(self.memory.update), "rollout_bytes": sum_bytes(self.memory.rollout)}
            plain["memory"] |= sums
        return plain


def make_plan(
    config: DictConfig,
    given: dict[str, float],
    measured: Texts | None,
    device_bytes: float,
    overrides: Sequence[str] = (),
) -> Plan:
    """Plan the composed training ``config``, whose data and model may be missing.

    ``given`` are known values of :class:`Texts`, before those ``measured`` in another run; unknown lengths count as
    their maximum. Keys not among ``overrides`` are chosen as by the launcher.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    settings = RunSettings.from_config(config)
    check_whole_numbers(config)
    shape = RunShape.of_config(config, count_turns(settings.env))
    most = Texts(shape.max_turns, data.max_prompt_length, data.max_response_length, data.max_response_length)
    known = asdict(measured or most) | given
    known["written"] = min(known["written"], known["response"]) if "written" not in given else known["written"]
    texts = Texts(**known)
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n
    path = config.actor_rollout_ref.model.path
    rewrites = None if shape.per_turn or path is None else find_rewriting(config, settings, str(path))
    step = size_step(settings.algorithm, shape, texts, mini_batch, rewrites=bool(rewrites))
    if path is None:
        return Plan(shape, texts, step, None, None, device_bytes, rewrites=rewrites)
    model = find_architecture(str(path))
    resolve_dtype(config, measure_weights(Path(str(path))) or 2 * model.parameters)
    try:
        fit = fit_training(config, overrides, device_bytes)
        choice, refused = fit.describe() if fit else "", False
    except SpearError as error:
        choice, refused = str(error), True
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    tokens = min(float(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu), mini_batch * step.row_tokens / ranks)
    longest = data.max_prompt_length + data.max_response_length
    memory = size_memory(config, model, tokens, longest, device_bytes)
    short = memory.cache_tokens is not None and memory.cache_tokens < longest
    largest = max(sum_bytes(memory.update), sum_bytes(memory.rollout))
    fits = not refused and not short and largest <= device_bytes
    return Plan(shape, texts, step, model.parameters, memory, device_bytes, choice, fits, rewrites)


def find_rewriting(config: DictConfig, settings: RunSettings, name: str) -> bool | None:
    """Whether the chat template of model ``name`` begins a row at every turn; None if its tokenizer is not here."""
    from spear_agents.engines.hf import load_tokenizer  # imports torch

    folder = find_folder(name)
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    template = getattr(find_creator(settings.env.id), "templates", {}).get(settings.env.template, DefaultTemplate())
    keywords = config.data.apply_chat_template_kwargs
    taken = OmegaConf.to_container(keywords, resolve=True) if keywords else None
    return PromptBuilder(load_tokenizer(folder), template, Layout.CONVERSATION, template_kwargs=taken).splits


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan with its formulas."""
    shape, texts, step = plan.shape, plan.texts, plan.step
    rows = "one for each episode"
    if shape.per_turn or plan.rewrites:
        rows = f"episodes × {texts.turns:g} turns"
        rows += "" if shape.per_turn else ": the chat template rewrites earlier responses"
    elif plan.rewrites is None:
        rows += ", if the chat template keeps earlier responses (there is no tokenizer to tell)"
    trained = f"rows × {step.trained / step.rows:g}, the share of groups that are kept" if step.rows else ""
    _print_table(
        console,
        "A step",
        [
            ("episodes", _count(step.episodes), f"{shape.tasks} tasks × {shape.group_size}"),
            ("rows", _count(step.rows), rows),
            ("tokens of a row", _count(step.row_tokens), f"prompt {texts.prompt:g} + response {texts.response:g}"),
            ("tokens", _count(step.tokens), "rows × tokens of a row"),
            ("written by the policy", _count(step.written), f"rows × {texts.written:g}"),
            ("rows trained on", _count(step.trained), trained),
            ("optimiser steps", str(step.optimiser_steps), "rows trained on / rows of a mini-batch"),
        ],
    )
    if step.replay_period is not None:
        _print_table(console, "Replay", _describe_replay(step, texts))
    elif step.kept:
        console.print(f"Replay: never; {step.kept:,.0f} rows a step expire before they fill the buffer\n")
    else:
        console.print("Replay: none\n")
    if plan.memory is None or plan.parameters is None:
        console.print("Memory: unknown without a model; add actor_rollout_ref.model.path=FOLDER", soft_wrap=True)
        return
    _print_memory(console, plan.memory, plan.parameters, plan.device_bytes, step)
    if plan.choice:
        console.print(f"The launcher: {plan.choice}", highlight=False)


def _describe_replay(step: StepSizes, texts: Texts) -> list[tuple[str, str, str]]:
    own = step.replay_optimiser_steps
    steps = "rows of a replay / rows of a mini-batch" if own else "replayed rows join the on-policy ones"
    stored = f"{step.store_rows:,.0f} rows × (4 (prompt + response) + 4 written + response / 8 + 200)"
    return [
        ("rows added a step", _count(step.kept), f"rows trained on × {texts.positive:g} with a positive advantage"),
        ("first replay", f"step {step.first_replay}", "1 + steps until the buffer is full"),
        ("then every", f"{step.replay_period} steps", "a replay empties the buffer"),
        ("rows of a replay", _count(step.drawn), "at most: the capacity, if all are above the baseline"),
        ("its optimiser steps", str(own or "none"), steps),
        ("store", _bytes(step.store_bytes), stored),
    ]


def _print_memory(console: Console, memory: DeviceMemory, parameters: int, device: float, step: StepSizes) -> None:
    for title, items in (("while it is updated", memory.update), ("while it generates", memory.rollout)):
        rows = [(item.name, _bytes(item.bytes), item.formula) for item in items]
        total = sum_bytes(items)
        verdict = f"does not fit into {_bytes(device)}" if total > device else f"of {_bytes(device)}"
        rows.append(("sum", _bytes(total), verdict))
        _print_table(console, f"Memory of a device {title}, P = {parameters:,}", rows)
    if memory.cache_tokens is not None:
        rows_at_once = max(0.0, memory.cache_tokens) / step.row_tokens
        console.print(
            f"The cache of a replica holds {max(0.0, memory.cache_tokens):,.0f} tokens: {rows_at_once:,.0f} rows at a "
            "time" + ("" if rows_at_once >= 1 else "; raise actor_rollout_ref.rollout.gpu_memory_utilization")
        )


def _print_table(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(min_width=22)
    table.add_column(justify="right", min_width=12)
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*row, style="red" if row[2].startswith("does not fit") else None)
    console.print(table, "")


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    return f"{value / GIB:,.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.1f} MiB"
