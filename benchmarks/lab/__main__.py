"""``python -m benchmarks.lab``: compare ways to train over many seeds."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spear_sandbox.console import run_command

FILE = click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))


@click.group("lab")
def lab() -> None:
    """Compare ways to train over many seeds, in minutes on a CPU.

    The step, its advantages, buffers and loss are the trainer's; the policy is a small network in this process that
    plays rooms of Sokoban, a token a turn, and its success is computed, not sampled. A comparison is a YAML file,
    registered before the first run: benchmarks/lab has those of docs/results.md. With `engine: trainer` it is run by
    `spear train` with the demo's policy, which takes minutes per run.

    \b
      python -m benchmarks.lab run benchmarks/lab/fresh_03.yaml --out runs/lab/fresh_03
      python -m benchmarks.lab report benchmarks/lab/fresh_03.yaml runs/lab/fresh_03/result.json
    """


@lab.command("run")
@FILE
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the runs.")
@click.option("--jobs", type=click.IntRange(1), default=2, help="Runs at a time; always 1 for the trainer.")
def run(file: Path, out: Path, jobs: int) -> None:
    """Make the runs of FILE that are missing in --out.

    The same command resumes.

    \b
      python -m benchmarks.lab run benchmarks/lab/fresh_03.yaml --out runs/fresh_03
    """
    from benchmarks.lab.comparison import Comparison
    from benchmarks.lab.runs import RESULT, Registry, run_all

    comparison = Comparison.read(file)
    registry = Registry(comparison, out)
    console = Console(soft_wrap=True)
    console.print(f"{comparison.title}: registered as {comparison.digest[:12]}", markup=False)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        made, wanted = registry.count()
        bar = progress.add_task("runs", total=wanted, completed=made)
        run_all(registry, jobs, lambda: progress.advance(bar))
    console.print(f"{out / RESULT}", markup=False)


@lab.command("report")
@FILE
@click.argument("result", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--explore", multiple=True, metavar="ARM:BASE", help="A difference that is not in FILE.")
@click.option("--figure", type=click.Path(path_type=Path), help="Picture of curves and differences.")
@click.option(
    "--page", type=click.Path(path_type=Path, exists=True), help="Page with a marked place for FILE's tables."
)
def report(file: Path, result: Path, explore: tuple[str, ...], figure: Path | None, page: Path | None) -> None:
    """Print the tables of RESULT.

    FILE must be the same as when RESULT was made.

    \b
      python -m benchmarks.lab report benchmarks/lab/fresh_03.yaml runs/fresh_03/result.json
    """
    from benchmarks.lab.comparison import Comparison
    from benchmarks.lab.report import Findings
    from benchmarks.runner.report import fill_places

    pairs = [tuple(pair.split(":")) for pair in explore]
    if any(len(pair) != 2 for pair in pairs):
        raise click.UsageError("--explore takes ARM:BASE")
    findings = Findings(Comparison.read(file), result)
    text = findings.write_tables(pairs)  # type: ignore[arg-type]
    if figure is not None:
        from benchmarks.lab.plots import plot_findings

        plot_findings(findings, figure)
    if page is not None:
        fill_places(page, {f"lab {file.stem}": text})
    else:
        click.echo(text, nl=False)


if __name__ == "__main__":
    run_command(lab, "python -m benchmarks.lab", explain=lambda error: f"{error.name} is not installed: make setup")
