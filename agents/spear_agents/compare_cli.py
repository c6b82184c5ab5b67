"""``spear compare``: two evaluations on the same tasks, and whether they differ by more than chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spear_agents.evaluate import compare_runs
from spear_agents.records import read_settings
from spear_agents.significance import Judgement, explain_comparison, judge_comparison
from spear_agents.statistics import Comparison, Estimate, Metric

_UNCHANGING = ("model_digest", "fingerprint", "tokenizer")


@click.command()
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@click.option("--metric", type=click.Choice([metric.value for metric in Metric]), default="success", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap and of drawn permutations.")
@click.option("--json", "as_json", is_flag=True, help="Figures for programs.")
def compare(before: Path, after: Path, metric: str, seed: int, as_json: bool) -> None:
    """Compare two folders of `spear eval --out`, task by task.

    Both must be on the same task set (their fingerprints are compared).  Exit code 0 whether they differ or not.
    """
    comparison = compare_runs(before, after, Metric(metric))
    judgement = judge_comparison(comparison, seed)
    changes = list_changes(read_settings(before), read_settings(after))
    names = name_runs(before, after)
    sentences = explain_comparison(comparison, judgement, *names)
    if as_json:
        found = comparison.to_json() | {"metric": metric, "settings": changes, "sentences": sentences}
        click.echo(json.dumps(found | {"judgement": judgement.to_json()}, indent=2))
        return
    console = Console()
    console.print(make_table(comparison, judgement, names, Metric(metric)))
    for key, (old, new) in changes.items():
        console.print(f"{key}: {old!r} -> {new!r}", soft_wrap=True, markup=False)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, markup=False)


def name_runs(before: Path, after: Path) -> tuple[str, str]:
    """Short names of two folders that are not the same."""
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
        table.add_row(name, f"{100 * estimate.mean:.1f}", _interval(estimate.low, estimate.high))
    table.add_section()
    difference: Estimate = comparison.difference
    table.add_row("difference", f"{100 * difference.mean:+.1f}", _interval(difference.low, difference.high, "+"))
    table.add_row("bootstrap", "", _interval(judgement.bootstrap_low, judgement.bootstrap_high, "+"))
    table.add_row("tasks better / worse", f"{comparison.gained} / {comparison.lost}", "")
    table.add_row("sign test, exact", f"p = {judgement.sign_p:.2g}", "")
    kind = "exact" if judgement.exact else "drawn"
    table.add_row(f"permutation test, {kind}", f"p = {judgement.permutation_p:.2g}", "")
    return table


def _interval(low: float, high: float, sign: str = "") -> str:
    return f"[{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
