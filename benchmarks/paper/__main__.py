"""``python -m benchmarks.paper``: train and evaluate a table of the paper, and write it beside the paper's figures."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.table import Table

from benchmarks.paper.jobs import MACHINE, Choice, Flavour, Job
from benchmarks.paper.tables import Gathered, gather, make_latex, make_markdown
from benchmarks.runner.report import fill_places
from spear_envs.core.errors import SpearError
from spear_envs.data.files import hold_lock, write_text
from spear_sandbox.console import echo, run_command
from spear_sandbox.terminal import Console

CLUSTERS = ("8gpu", "1gpu", "4x8gpu")


class Patterns(click.ParamType):
    """Names with ``*`` and ``?`` in them, with commas between."""

    name = "patterns"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Split a text."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def pattern_option(name: str, what: str) -> Any:
    """An option that chooses by name."""
    return click.option(f"--{name}", type=Patterns(), metavar="PATTERN[,…]", default=("*",), help=what)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def paper() -> None:
    """Make tables of the paper: trainings, evaluations, what they cost, and what is missing."""


@paper.command()
@pattern_option("rows", "Only these rows, such as 'grpo*' or io,react.")
@pattern_option("models", "Only these models.")
@pattern_option("environments", "Only these environments.")
@click.option(
    "--seeds", type=click.IntRange(1), default=3, show_default=True, help="Trainings of each row, from seed 0."
)
@click.option(
    "--flavour",
    type=click.Choice([Flavour.PAPER.value, Flavour.OFFICIAL.value]),
    default=Flavour.PAPER.value,
    show_default=True,
    help="Train by the paper's table, or as the authors' code.",
)
@click.option("--tiny", is_flag=True, help="Tiny policies on a CPU instead, a few steps each.")
@click.option("--cluster", type=click.Choice(CLUSTERS), default="8gpu", show_default=True, help="Of the trainings.")
@click.option("--best", is_flag=True, help="Evaluate the best checkpoint of a validation instead of the last.")
@click.option("--prune", is_flag=True, help="Remove the checkpoints of a training that has been evaluated.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/table1"),
    show_default=True,
    help="Folder of runs and tables.",
)
@click.option("--list", "only_list", is_flag=True, help="List the jobs, what they cost and how far they are, and stop.")
@click.option("--gather", "only_gather", is_flag=True, help="Write the table of what there is, and stop.")
@click.option(
    "--docs",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Page whose place <!-- table1 FLAVOUR --> gets the table, too.",
)
def table1(
    rows: Sequence[str],
    models: Sequence[str],
    environments: Sequence[str],
    seeds: int,
    flavour: str,
    tiny: bool,
    cluster: str,
    best: bool,
    prune: bool,
    out: Path,
    only_list: bool,
    only_gather: bool,
    docs: Path | None,
) -> None:
    """Make Table 1, ALFWorld and WebShop.

    Does what has not been done, one command of spear after another, and writes table.md and table.tex. The same command
    resumes after Ctrl-C. Exit code 1 if a command failed.

    \b
      python -m benchmarks.paper table1 --list
      python -m benchmarks.paper table1 --rows grpo,grpo_spear --models qwen2.5_1.5b --seeds 1
      python -m benchmarks.paper table1 --tiny --seeds 1
    """
    if tiny and (flavour != Flavour.PAPER.value or models != ("*",) or best):
        raise SpearError(
            "A tiny table has one model, one flavour and no validation: leave --flavour, --models, --best."
        )
    chosen = Flavour.TINY if tiny else Flavour(flavour)
    choice = Choice(rows, models, environments, seeds, chosen, out, cluster, best)
    jobs = choice.list_jobs()
    console = Console(soft_wrap=True)
    if only_list:
        show_jobs(jobs, console)
        return
    failed = {} if only_gather else run_jobs(jobs, out, console, prune=prune)
    write_tables(gather(choice), docs, console)
    if failed:
        first, reason = next(iter(failed.items()))
        raise click.ClickException(f"{len(failed)} jobs failed, the first {first}: {reason}")


def show_jobs(jobs: Sequence[Job], console: Console) -> None:
    """Print a line for each row, model and environment, then the sums over all seeds."""
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.model, job.row.name, job.environment.name), []).append(job)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("model", "row", "environment", "done", "next", "M tokens", "hours"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("M tokens", "hours") else "left")
    for names, group in groups.items():
        following = [job.find_next() for job in group]
        done = f"{sum(step is None for step in following)} of {len(group)}"
        left = Counter(step.name for step in following if step is not None)
        cost = group[0].cost
        hours = "" if cost.hours is None else f"{cost.hours:,.1f}"
        table.add_row(*names, done, ", ".join(left), f"{cost.tokens / 1e6:,.1f}", hours)
    console.print(table)
    trainings = [job for job in jobs if job.row.method is None]
    tokens, total = sum(job.cost.tokens for job in jobs), sum(job.cost.hours or 0.0 for job in jobs)
    told = f"{len(trainings)} trainings, {len(jobs)} evaluations: at most {tokens / 1e9:,.1f} billion tokens"
    told += f", {total:,.0f} hours on {MACHINE} GPUs" if total else ""
    console.print(f"{told}. A line counts the longest rows of one seed.", highlight=False)


def run_jobs(jobs: Sequence[Job], out: Path, console: Console, *, prune: bool) -> dict[str, str]:
    """Do what has not been done; return the jobs that failed, with the reasons.

    Raises:
        SpearError: another call works in ``out``.
    """

    def refuse() -> NoReturn:
        raise SpearError(f"Another call works in {out}: wait for it, or give another --out.")

    failed = {}
    signal.signal(signal.SIGTERM, _interrupt)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with hold_lock(out, refuse):
            for number, job in enumerate(jobs, start=1):
                while (step := job.find_next()) is not None:
                    console.print(f"[{number} of {len(jobs)}] {job.name}: {step.name}", markup=False, highlight=False)
                    if reason := job.do(step):
                        failed[job.name] = f"{step.name}: {reason}"
                        console.print(failed[job.name], style="bold red", markup=False)
                        break
                if prune and job.name not in failed:
                    job.prune()
    except KeyboardInterrupt:
        raise click.ClickException("Interrupted; what has finished is kept, and the same command resumes.") from None
    return failed


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def write_tables(gathered: Gathered, docs: Path | None, console: Console) -> None:
    """Write table.md and table.tex beside the runs, fill the page, and print what is missing."""
    choice = gathered.choice
    folder, text = choice.out / choice.flavour.value, make_markdown(gathered)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", text)
    write_text(folder / "table.tex", make_latex(gathered))
    if docs is not None:
        fill_places(docs, {f"table1 {choice.flavour.value}": f"\n{text}\n"})
    for each in gathered.missing:
        echo(f"missing: {each.name} ({'; '.join(each.reasons)}): {each.command}")
    echo(f"{folder / 'table.md'}, table.tex: {len(gathered.results)} of {len(gathered.jobs)} evaluations")


if __name__ == "__main__":
    run_command(paper, "python -m benchmarks.paper", explain=lambda error: f"{error.name} is not installed: make setup")
