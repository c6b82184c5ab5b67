"""``spear compare``: two evaluations on the same tasks, and whether they differ by more than chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from spear_agents.evaluation import compare_runs
from spear_agents.records import EPISODES, read_last, read_settings
from spear_agents.significance import (
    CrossedComparison,
    Judgement,
    compare_pairs,
    count_pairs,
    explain_comparison,
    judge_comparison,
)
from spear_agents.statistics import Comparison, Estimate, Metric
from spear_envs.core.errors import SpearError
from spear_envs.data.progress import show_table
from spear_sandbox.console import echo
from spear_sandbox.terminal import Console

_UNCHANGING = ("model_digest", "fingerprint", "tokenizer")


@click.command()
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--pair",
    "more",
    nargs=2,
    multiple=True,
    metavar="A2 B2",
    type=click.Path(path_type=Path),
    help="One more pair, of runs of another training seed; may be repeated.",
)
@click.option("--metric", type=click.Choice([metric.value for metric in Metric]), default="success")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of drawn permutations.")
@click.option("--json", "as_json", is_flag=True, help="Figures for programs.")
def compare(
    before: Path, after: Path, more: Sequence[tuple[Path, Path]], metric: str, seed: int, as_json: bool
) -> None:
    """Compare two folders of `spear eval --out`, task by task.

    Both must be on the same task set (their fingerprints are compared). Exit code 0 whether they differ or not.

    An interval over tasks describes these two runs only. To compare two ways of training, give the runs of several
    seeds (--pair): the interval over seeds and tasks covers runs of other seeds.

    \b
      spear compare runs/before runs/after
      spear compare runs/grpo-0 runs/spear-0 --pair runs/grpo-1 runs/spear-1
    """
    if more:
        _compare_seeds([(before, after), *more], Metric(metric), as_json)
        return
    comparison = compare_runs(before, after, Metric(metric))
    judgement = judge_comparison(comparison, seed)
    changes = list_changes(read_settings(before), read_settings(after))
    names = name_runs(before, after)
    sentences = explain_comparison(comparison, judgement, *names)
    if as_json:
        found = comparison.to_json() | {"metric": metric, "settings": changes, "sentences": sentences}
        echo(json.dumps(found | {"judgement": judgement.to_json()}, indent=2))
        return
    console = Console()
    show_table(console, make_table(comparison, judgement, names, Metric(metric)))
    for key, (old, new) in changes.items():
        console.print(f"{key}: {old!r} -> {new!r}", soft_wrap=True)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def _compare_seeds(folders: Sequence[tuple[Path, Path]], metric: Metric, as_json: bool) -> None:
    """Compare several pairs of runs, over seeds and tasks. Raises SpearError if a pair is given twice."""
    if len({(first.resolve(), second.resolve()) for first, second in folders}) < len(folders):
        raise SpearError("a pair is given twice: each must be of another training seed")
    runs = [(read_last(first / EPISODES), read_last(second / EPISODES)) for first, second in folders]
    found = compare_pairs(runs, metric)
    sentences = explain_pairs(found)
    if as_json:
        echo(json.dumps(found.to_json() | {"metric": metric.value, "sentences": sentences}, indent=2))
        return
    table = Table(
        title=f"{metric.value}, {len(folders)} seeds × {found.difference.tasks} tasks", box=SIMPLE_HEAD, min_width=60
    )
    for column in ("", "mean", "CI95"):
        table.add_column(column, justify="right" if column else "left")
    names = name_runs(*folders[0])
    for name, estimate in zip(names, (found.before, found.after), strict=True):
        table.add_row(f"{name} …", *_figures(estimate))
    table.add_section()
    table.add_row("difference", *_figures(found.difference, "+"))
    table.add_row("over these runs' tasks alone", *_figures(found.tasks_alone, "+"))
    table.add_row("seed by seed", ", ".join(f"{100 * step:+.1f}" for step in found.by_seed), "")
    console = Console()
    show_table(console, table)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def explain_pairs(found: CrossedComparison) -> list[str]:
    """Explain the figures of several pairs in sentences."""
    difference, points = found.difference, 100 * found.difference.mean
    if difference.low > 0 or difference.high < 0:
        better = "The second" if points > 0 else "The first"
        told = f"{better} way of training is better by {abs(points):.1f} points, over seeds and tasks."
    else:
        told = f"No difference between the two ways of training is shown: {points:+.1f} points may well be chance."
        if found.tasks_alone.low > 0 or found.tasks_alone.high < 0:
            told += " The interval over tasks alone leaves 0 out, but it describes these runs only."
    sentences = [told]
    deviation = stdev(found.by_seed)
    if deviation and points:
        pairs = count_pairs(deviation, difference.mean)
        sentences.append(
            f"The pairs deviate by {100 * deviation:.1f} points; to show a true difference of {abs(points):.1f} points"
            f" 4 times in 5, about {pairs:,} pairs would be needed."
        )
    return sentences


def name_runs(before: Path, after: Path) -> tuple[str, str]:
    """Short, different names of two folders."""
    first, second = before.resolve(), after.resolve()
    return (first.name, second.name) if first.name != second.name else (str(before), str(after))


def list_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings in which two evaluations differ."""
    keys = [key for key in {**old, **new} if key not in _UNCHANGING]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def make_table(comparison: Comparison, judgement: Judgement, names: tuple[str, str], metric: Metric) -> Table:
    """Both runs, their paired difference and the tests."""
    table = Table(title=f"{metric.value}, {len(comparison.steps)} tasks", box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("CI95", justify="right")
    for name, estimate in zip(names, (comparison.before, comparison.after), strict=True):
        table.add_row(name, *_figures(estimate))
    table.add_section()
    table.add_row("difference", *_figures(comparison.difference, "+"))
    table.add_row("tasks better / worse", f"{comparison.gained} / {comparison.lost}", "")
    table.add_row("sign test, exact", f"p = {judgement.sign_p:.2g}", "")
    kind = "exact" if judgement.exact else "drawn"
    table.add_row(f"permutation test, {kind}", f"p = {judgement.permutation_p:.2g}", "")
    return table


def _figures(estimate: Estimate, sign: str = "") -> tuple[str, str]:
    return f"{100 * estimate.mean:{sign}.1f}", _interval(estimate.low, estimate.high, sign)


def _interval(low: float, high: float, sign: str) -> str:
    return f"[{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
