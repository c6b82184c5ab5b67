"""``spear warmstart``: a tiny policy to start reinforcement learning from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spear_agents.trajectory import Layout
from spear_envs.cli import read_keywords
from spear_envs.completion import ENV, SPLIT
from spear_sandbox.terminal import Console
from spear_sandbox.web.options import Number


@click.command("warmstart")
@click.argument("env_id", metavar="ENV", type=ENV)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New Hugging Face folder.")
@click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--template", help="Prompt template of the environment.")
@click.option("--layout", type=click.Choice([x.value for x in Layout]), help="One row per turn, or per conversation.")
@click.option("--history", type=click.IntRange(0), help="Earlier turns shown in per_turn prompts.")
@click.option("--episodes", type=int, help="Expert episodes.")
@click.option("--noise", type=Number(0, 1), help="Share of the expert's turns that are errors.")
@click.option("--inadmissible", type=Number(0, 1), help="Share of its errors without effect.")
@click.option(
    "--answers",
    type=click.Choice(["played", "expert"]),
    help="Learn what was played in won episodes, or what the expert would do in every state.",
)
@click.option("--epochs", type=int, help="Passes over the rows.")
@click.option("--batch", type=int, help="Rows of an optimiser step.")
@click.option("--learning-rate", type=Number(0, min_open=True), help="Highest learning rate.")
@click.option("--hidden", type=int, help="Width of the model.")
@click.option("--layers", type=int, help="Depth of the model.")
@click.option("--heads", type=int, help="Attention heads of a layer.")
@click.option("--mlp", type=int, help="Width of the feed-forward part.")
@click.option("--valid-split", type=SPLIT, help="Split on which the result is measured.")
@click.option("--panel-tasks", type=int, help="Number of its leading tasks to play; 0 for none.")
@click.option("--target", type=Number(0, 1), help="Continue training below this success on them.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--threads", type=click.IntRange(1), default=1, help="Compute threads.")
@click.option("--overwrite", is_flag=True, help="Replace the folder if it exists.")
def warmstart(
    env_id: str, out: Path, env_keywords: tuple[str, ...], threads: int, overwrite: bool, **given: Any
) -> None:
    """Make a tiny policy for ENV from the episodes of a noisy expert.

    The result, a Qwen3 model of the given size and its tokenizer, loads in transformers, verl and vLLM like any other.
    Defaults are those of the environment's recipe (training/spear_training/warmstart/recipes.py), from which
    `spear train preset=demo`, `alfworld_tiny`, `code_tiny`, `search_tiny` or `webshop_tiny` continues.

    \b
      spear warmstart spear/Sokoban-v1 --out runs/warmstart
    """
    from spear_training.warmstart import Answers, choose_recipe, train_policy  # imports torch and transformers

    recipe = choose_recipe(env_id)
    chosen = {name: value for name, value in given.items() if value is not None}
    shape = {name: chosen.pop(name) for name in ("hidden", "layers", "heads", "mlp") if name in chosen}
    for name, kind in (("layout", Layout), ("answers", Answers)):
        if name in chosen:
            chosen[name] = kind(chosen[name])
    settings = replace(
        recipe,
        env_kwargs={**recipe.env_kwargs, **read_keywords(env_keywords)},
        shape=replace(recipe.shape, **shape),
        **chosen,
    )
    console, text = Console(), TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        bar = progress.add_task("expert episodes", total=settings.episodes)
        report = train_policy(
            settings,
            out,
            threads=threads,
            overwrite=overwrite,
            observer=lambda stage, done, total: progress.update(bar, description=stage, completed=done, total=total),
        )
    console.print(
        f"{report.parameters:,} parameters, {report.vocabulary} tokens; {report.rows:,} rows, {report.steps} steps, "
        f"loss {report.loss:.3f}; CPU {report.collect_cpu_s:.0f} s for episodes, {report.train_cpu_s:.0f} s to train",
        soft_wrap=True,
    )
    if report.valid is not None and report.valid.success is not None:
        success = report.valid.success
        console.print(
            f"valid panel at temperature 1: {100 * success.mean:.1f} % won "
            f"(CI95 {100 * success.low:.1f} to {100 * success.high:.1f}, {success.tasks} tasks), "
            f"score {100 * report.valid.score:.1f}, "
            f"{100 * report.valid.format_ok:.2f} % of the turns well-formed, "
            f"{100 * report.valid.action_ok:.1f} % valid actions",
            soft_wrap=True,
        )
    console.print(f"policy: {out}", soft_wrap=True)
