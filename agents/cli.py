"""``spear eval``: how good is a policy, on which tasks, and how sure is that."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from agents.evaluate import SUMMARY, EngineKind, EvalSettings, Evaluation, play_baseline, run_evaluation, write_summary
from agents.statistics import Part
from agents.trajectory import Layout, Trajectory
from spear_envs.cli import read_keywords


@click.command("eval")
@click.argument("env_id", metavar="ENV")
@click.option("--engine", type=click.Choice([kind.value for kind in EngineKind]), default="hf", show_default=True)
@click.option("--model", type=click.Path(path_type=Path), help="Hugging Face folder of the policy (engine hf).")
@click.option("--split", help="Split of the tasks; by default the last of the environment's, such as test.")
@click.option("--tasks", default="all", show_default=True, help="all, a number of leading tasks, or ids with commas.")
@click.option("--episodes-per-task", type=int, default=1, show_default=True)
@click.option("--temperature", type=float, default=1.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--max-tokens", type=int, help="Longest response; default: the model's own limit, else 512.")
@click.option("--max-prompt-tokens", type=int, help="Episodes whose prompt grows beyond end as context_limit.")
@click.option("--template", default="compact", show_default=True, help="Prompt template of the environment.")
@click.option("--layout", type=click.Choice([x.value for x in Layout]), default="per_turn", show_default=True)
@click.option("--history", type=int, default=2, show_default=True, help="Earlier turns shown in per_turn prompts.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for episodes.jsonl and summary.json; resumable.")
@click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--concurrency", type=click.IntRange(1), default=128, show_default=True, help="Episodes at a time.")
@click.option("--baselines", is_flag=True, help="Also play the random policy and the expert on the same tasks.")
def evaluate(
    env_id: str,
    engine: str,
    model: Path | None,
    layout: str,
    out: Path | None,
    env_keywords: tuple[str, ...],
    concurrency: int,
    baselines: bool,
    **options: Any,
) -> None:
    """Evaluate a policy on ENV, for instance spear/Sokoban-v0.

    Success is a mean over tasks with its 95 % confidence interval.  With --out the episodes are kept: the same
    command again plays only what is missing.
    """
    settings = EvalSettings(
        env_id=env_id,
        engine=EngineKind(engine),
        model=None if model is None else str(model),
        env_kwargs=read_keywords(env_keywords),
        layout=Layout(layout),
        **options,
    )
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("won {task.fields[won]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task(engine, total=None, won="")
        wins: list[bool] = []

        def observe(done: int, total: int, trajectory: Trajectory | None) -> None:
            if trajectory is not None:
                wins.append(trajectory.won)
            share = f"{sum(wins) / len(wins):.1%}" if wins else ""
            progress.update(bar, completed=done, total=total, won=share)

        evaluation = run_evaluation(settings, out, concurrency=concurrency, observer=observe)
        others: dict[str, Part] = {}
        for kind in (EngineKind.RANDOM, EngineKind.EXPERT) if baselines else ():
            progress.update(bar, description=f"baseline {kind.value}")
            others[kind.value] = play_baseline(evaluation.settings, kind, concurrency=concurrency)
        if out is not None and others:
            write_summary(out, evaluation, others)
    console.print(make_table(evaluation, others))
    console.print(f"tasks {evaluation.fingerprint}", soft_wrap=True)
    if out is not None:
        console.print(f"episodes and figures: {out / SUMMARY}", soft_wrap=True)


def make_table(evaluation: Evaluation, others: dict[str, Part]) -> Table:
    """Success by subtask, all tasks together and the baselines.

    ``score`` is 100 times the benchmark's own; ``form %`` the share of well-formed turns, ``valid %`` of those whose
    action did something.
    """
    settings = evaluation.settings
    table = Table(
        title=f"{settings.env_id} {settings.split}, {settings.engine.value}, temperature {settings.temperature:g}",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("subtask", no_wrap=True)
    for name in ("tasks", "episodes", "won %", "CI95", "score", "turns", "form %", "valid %", "faults"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, part in evaluation.subtasks.items():
        table.add_row(name, *_cells(part))
    table.add_section()
    table.add_row("all", *_cells(evaluation.overall), style="bold")
    for name, part in others.items():
        table.add_row(f"({name})", *_cells(part))
    return table


def _cells(part: Part) -> list[str]:
    success = part.success
    if success is None:
        return ["0", "0", *["–"] * 6, str(part.faults)]
    interval = f"{100 * success.low:.1f}–{100 * success.high:.1f}" if math.isfinite(success.low) else "–"
    return [
        str(success.tasks),
        str(part.episodes),
        f"{100 * success.mean:.1f}",
        interval,
        f"{100 * part.score:.1f}",
        f"{part.turns:.1f}",
        f"{100 * part.format_ok:.1f}",
        f"{100 * part.action_ok:.1f}",
        str(part.faults),
    ]
