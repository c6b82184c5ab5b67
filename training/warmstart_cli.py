"""``spear warmstart``: makes a tiny policy that reinforcement learning can start from."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agents.trajectory import Layout
from spear_envs.cli import read_keywords


@click.command("warmstart")
@click.argument("env_id", metavar="ENV")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New Hugging Face folder.")
@click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--template", default="compact", show_default=True, help="Prompt template of the environment.")
@click.option("--layout", type=click.Choice([x.value for x in Layout]), default="per_turn", show_default=True)
@click.option("--episodes", type=int, default=2500, show_default=True, help="Expert episodes; won ones are learnt.")
@click.option("--noise", type=float, default=0.5, show_default=True, help="Share of random actions of the expert.")
@click.option("--epochs", type=int, default=2, show_default=True)
@click.option("--batch", type=int, default=32, show_default=True, help="Rows of an optimiser step.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True)
@click.option("--hidden", type=int, default=96, show_default=True, help="Width of the model.")
@click.option("--layers", type=int, default=4, show_default=True)
@click.option("--heads", type=int, default=3, show_default=True)
@click.option("--mlp", type=int, default=256, show_default=True, help="Width of the feed-forward part.")
@click.option("--panel-tasks", type=int, default=256, show_default=True, help="Valid tasks to measure on; 0 for none.")
@click.option("--target", type=float, default=0.3, show_default=True, help="Train on below this success on them.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Compute threads.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace the folder if it exists.")
def warmstart(
    env_id: str,
    out: Path,
    env_keywords: tuple[str, ...],
    template: str,
    layout: str,
    episodes: int,
    noise: float,
    epochs: int,
    batch: int,
    learning_rate: float,
    hidden: int,
    layers: int,
    heads: int,
    mlp: int,
    panel_tasks: int,
    target: float,
    threads: int,
    seed: int,
    overwrite: bool,
) -> None:
    """Make a tiny policy for ENV from the episodes of a noisy expert.

    The result, a Qwen3 model of the given size and its tokenizer, loads in transformers, verl and vLLM like any other.
    """
    from training.warmstart import PolicyShape, WarmStartSettings, train_policy  # imports torch and transformers

    settings = WarmStartSettings(
        env_id=env_id,
        env_kwargs=read_keywords(env_keywords),
        template=template,
        layout=Layout(layout),
        episodes=episodes,
        noise=noise,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        shape=PolicyShape(hidden, layers, heads, mlp),
        panel_tasks=panel_tasks,
        target=target,
        seed=seed,
    )
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("expert episodes", total=episodes)
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
            f"{100 * report.valid.format_ok:.2f} % of the turns well formed, "
            f"{100 * report.valid.action_ok:.1f} % valid actions",
            soft_wrap=True,
        )
    console.print(f"policy: {out}", soft_wrap=True)
