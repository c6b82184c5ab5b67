"""``spear data get|check code``: problems to train and to evaluate on."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from spear_envs.code.benchmarks import BENCHMARKS, Benchmark, list_files, open_benchmark, read_benchmark
from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, data_folder, fetch, verify
from spear_envs.data.cli import source_option
from spear_envs.data.files import record_checksum
from spear_envs.data.hub import find_given, list_given, list_published
from spear_envs.data.progress import show_bytes

__all__ = ["check", "get"]

_NAMES = click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)), metavar="[WHAT]...")


# Untried: the machine that this was written on does not reach Hugging Face; tests have a server of their own.
@click.command()
@_NAMES
@source_option
def get(names: tuple[str, ...], source: Path | None) -> None:
    """Fetch WHAT, by default all of it, from Hugging Face (or $HF_ENDPOINT).

    \b
    dapo-math-17k   about 17,400 problems with integer answers, to train on
    aime-2024       30 problems
    aime-2025       30 problems
    """
    console = Console()
    for name in names or BENCHMARKS:
        item = BENCHMARKS[name]
        files = (
            list_given(source, item.pattern) if source is not None else list_published(item.repository, item.pattern)
        )
        for file, path in _prefer_tables(files):
            found = fetch(file, item.folder, source=source and find_given(source, path), console=console)
            if file.sha256 is not None:
                record_checksum(found, file.sha256)
            else:
                _say(console, f"{path}: no SHA-256 is known; that of this copy is recorded beside it.")
        _say(console, str(item.folder))


def _prefer_tables(files: list[tuple[RemoteFile, str]]) -> list[tuple[RemoteFile, str]]:
    """The parquet files alone, where a repository has its problems in several forms."""
    return [(file, path) for file, path in files if path.endswith(".parquet")] or files


@click.command()
@_NAMES
def check(names: tuple[str, ...]) -> None:
    """Check the checksums of what was fetched, count the problems, and print their fingerprints.

    Exit code 1 if a file is damaged or a benchmark has not the published number of problems.
    """
    console = Console()
    present = [BENCHMARKS[name] for name in names or BENCHMARKS if BENCHMARKS[name].folder.is_dir()]
    if not present:
        raise SpearError(f"{data_folder() / 'code'} has none of it: 'spear data get code' fetches it.")
    table = Table(title="problems, each counted once")
    for column in ("dataset", "split", "rows", "problems", "contradicted", "fingerprint"):
        table.add_column(column, no_wrap=True)
    faults = []
    for item in present:
        _check_files(item, console)
        found = read_benchmark(item)
        count = len(found.problems)
        if item.count not in (None, count):
            faults.append(f"{item.name}: {count} problems instead of {item.count}")
        fingerprint = open_benchmark(item.name, item.split).fingerprint[:12] if count else "–"
        rows, due = f"{found.rows:,}", f" ({item.count})" if item.count else ""
        table.add_row(item.name, item.split, rows, f"{count:,}{due}", str(found.contradicted), fingerprint)
    console.print(table)
    for line in faults:
        _say(console, line)
    if faults:
        raise click.ClickException("problems are missing: delete those files, and 'spear data get code'.")


def _check_files(item: Benchmark, console: Console) -> None:
    for path in list_files(item):
        total, done = path.stat().st_size, 0
        with show_bytes(console) as show:

            def count(further: int, path: Path = path, total: int = total) -> None:
                nonlocal done
                done += further
                show(f"checking {path.name}", done, total)

            verify(RemoteFile(path.name), path.parent, count)
        _say(console, f"{item.name}: {path} is as it was fetched")


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)
