"""``spear bench``: the command."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.runner.compare import Change, compare_results, make_baseline
from benchmarks.runner.figures import Size, Status
from benchmarks.runner.registry import FOLDER, Benchmark, choose_benchmarks, find_benchmarks
from benchmarks.runner.report import list_judgements, make_markdown, show_results
from benchmarks.runner.results import SUMMARY, Result, Verdict, read_results, read_summary, write_summary
from benchmarks.runner.running import is_done, run_one
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_text

__all__ = ["bench"]

BASELINES = FOLDER / "baseline"
OUT = Path("runs/bench")
COLOURS = {Change.WORSE: "bold red", Change.BETTER: "green", Change.SAME: "", Change.MISSING: "yellow"}
OUT_OPTION = click.option(
    "--out", type=click.Path(path_type=Path), default=OUT, show_default=True, help="Folder of the results."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure speed and memory next to other packages."""


@bench.command("list")
def list_benchmarks() -> None:
    """List the benchmarks and how long each took."""
    stored = {size: _read_baseline(size) for size in (Size.QUICK, Size.STANDARD)}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("benchmark", "what is measured", "bars", *(f"min, {size.value}" for size in stored)):
        table.add_column(column, overflow="fold")
    for benchmark in find_benchmarks():
        results = [found.get(benchmark.name) for found in stored.values()]
        minutes = ["" if result is None else f"{result.seconds / 60:.1f}" for result in results]
        table.add_row(benchmark.name, Text(benchmark.summary), str(len(benchmark.bars)), *minutes)
    Console().print(table)


@bench.command()
@click.argument("names", nargs=-1)
@click.option("--quick", "size", flag_value=Size.QUICK.value, help="Minutes: fewer rounds, less of everything.")
@click.option("--full", "size", flag_value=Size.FULL.value, help="Everything: hours.")
@OUT_OPTION
@click.option("--again", is_flag=True, help="Also run what has finished.")
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), metavar="MINUTES", help="Time limit of one benchmark."
)
def run(names: tuple[str, ...], size: str | None, out: Path, again: bool, limit: float | None) -> None:
    """Run all benchmarks or those named.

    Prints figures and verdicts. The same command resumes after Ctrl-C and skips finished benchmarks. bench.json,
    bench.md and two pictures are next to the results. Exit code 1 if a bar does not hold or a benchmark failed.
    """
    known = find_benchmarks()
    chosen = choose_benchmarks(names, known)
    wanted = Size(size or Size.STANDARD)
    console = Console(soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _interrupt)
    reasons: dict[str, str] = {}
    try:
        for number, benchmark in enumerate(chosen, start=1):
            head = f"[{number} of {len(chosen)}] {benchmark.name}"
            if not again and is_done(read_results(out, [benchmark]).get(benchmark.name), wanted):
                console.print(f"{head}: finished before", markup=False, highlight=False)
                continue
            result = _run_with_progress(benchmark, out, wanted, head, console, limit)
            if result is None or result.status is Status.RUNNING:
                reasons[benchmark.name] = result.reason if result else f"it did not begin: see {benchmark.name}.log"
                console.print(f"{benchmark.name}: {reasons[benchmark.name]}", style="bold red", markup=False)
    except KeyboardInterrupt:
        _write_all(out, known)
        raise click.ClickException("Interrupted; what has finished is kept, and the same command resumes.") from None
    results = _write_all(out, known)
    show_results(chosen, results, console)
    console.print(f"{out / SUMMARY}, bench.md, bars.png, peers.png", markup=False, highlight=False)
    lost = [one.bar.name for one in list_judgements(chosen, results) if one.verdict is Verdict.NOT_HELD]
    if lost or reasons:
        parts = [f"{len(lost)} bars do not hold"] * bool(lost) + [f"failed: {', '.join(reasons)}"] * bool(reasons)
        raise click.ClickException("; ".join(parts) + ".")


@bench.command()
@OUT_OPTION
@click.option("--baseline", type=click.Path(dir_okay=False, path_type=Path), help="Also write them here, to compare.")
def show(out: Path, baseline: Path | None) -> None:
    """Print figures and bars of a run, finished or not."""
    known = find_benchmarks()
    results = read_results(out, known)
    if not results:
        raise SpearError(f"There are no results in {out}: spear bench run writes them; name its folder with --out.")
    show_results(known, results, Console(soft_wrap=True))
    if baseline is not None:
        baseline.parent.mkdir(parents=True, exist_ok=True)
        make_baseline(known, results, baseline)


@bench.command()
@click.argument("baseline", type=click.Path(exists=True, path_type=Path), required=False)
@OUT_OPTION
@click.option("--tolerance", type=click.FloatRange(min=1), default=1.5, show_default=True, help="Least ratio reported.")
def compare(baseline: Path | None, out: Path, tolerance: float) -> None:
    """Compare results with those of another run, by ratio.

    BASELINE is a bench.json or the folder of a run; by default the stored baseline of the same size. Times and rates
    are corrected for the speed of the cores, which each run has measured. Exit code 1 if a figure has become worse by
    more than the tolerance.
    """
    known = find_benchmarks()
    now = read_results(out, known)
    if not now:
        raise SpearError(f"There are no results in {out}: spear bench run writes them; name its folder with --out.")
    if baseline:
        before = read_summary(baseline)
    else:
        stored = {size: _read_baseline(size) for size in {result.size for result in now.values()}}
        before = {name: stored[one.size][name] for name, one in now.items() if name in stored[one.size]}
    changes = list(compare_results(known, before, now, tolerance))
    if not changes:
        raise SpearError("The two have no benchmark of one size in common: run it with the size of the baseline.")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("benchmark", "figure", "before", "now", "times worse", "change"):
        table.add_column(column, overflow="fold")
    for one in changes:
        if one.change is not Change.SAME:
            values = ["" if value is None else f"{value:,.4g} {one.unit}" for value in (one.before, one.now)]
            ratio = "" if one.ratio is None else f"{one.ratio:,.3g}"
            table.add_row(one.benchmark, Text(one.name), *values, ratio, Text(one.change.value, COLOURS[one.change]))
    console = Console(soft_wrap=True)
    console.print(table)
    counts = {change: sum(one.change is change for one in changes) for change in Change}
    console.print(", ".join(f"{count} {change.value}" for change, count in counts.items()), highlight=False)
    if counts[Change.WORSE]:
        raise click.ClickException(f"{counts[Change.WORSE]} figures are worse by more than {tolerance:g} times.")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _run_with_progress(
    benchmark: Benchmark, out: Path, size: Size, head: str, console: Console, limit: float | None
) -> Result | None:
    console.rule(f"{head}: {benchmark.summary}", align="left")
    begun = time.monotonic()
    status = Console(stderr=True).status(head)

    def report(line: str) -> None:
        status.update(f"{head}: {(time.monotonic() - begun) / 60:.1f} min")
        console.print(line, markup=False, highlight=False)

    with status:
        return run_one(benchmark, out, size, report, None if limit is None else 60 * limit)


def _read_baseline(size: Size) -> dict[str, Result]:
    path = BASELINES / f"{size.value}.json"
    return read_summary(path) if path.is_file() else {}


def _write_all(out: Path, known: Sequence[Benchmark]) -> dict[str, Result]:
    """The summary, the page and the pictures of all that is in the folder."""
    results = read_results(out, known)
    write_summary(out / SUMMARY, known, results)
    write_text(out / "bench.md", make_markdown(known, results))
    if find_spec("matplotlib") is not None:
        from benchmarks.runner.plots import plot_bars, plot_peers

        plot_bars(known, results, out / "bars.png")
        plot_peers(known, results, out / "peers.png")
    return results
