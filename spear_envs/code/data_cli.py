"""``spear data get|verify code``: problems for training and evaluation, and solutions to fine-tune on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import click
from rich.table import Table

from spear_envs.code.tasks import (
    BENCHMARKS,
    PUBLISHED,
    RETOOL_SFT,
    Benchmark,
    Publication,
    list_files,
    open_benchmark,
    read_benchmark,
)
from spear_envs.data import data_folder
from spear_envs.data.cli import (
    AbsentDataError,
    Collection,
    Expected,
    Finding,
    conclude,
    inspect_file,
    json_option,
    source_option,
)
from spear_envs.data.fetching import fetch_locked, list_given, list_remote, locate_page
from spear_envs.data.progress import say, show_table
from spear_envs.data.rows import parse_rows
from spear_sandbox.terminal import Console

PUBLICATIONS: Mapping[str, Publication] = {**BENCHMARKS, RETOOL_SFT.name: RETOOL_SFT}
"""What is fetched, by name."""
_NAMES = click.argument("names", nargs=-1, type=click.Choice(list(PUBLICATIONS)), metavar="[WHAT]...")


# Not tried against Hugging Face; tests use their own server.
@click.command()
@_NAMES
@source_option
def get(names: tuple[str, ...], source: Path | None) -> None:
    """Fetch WHAT, by default all of it, from Hugging Face (or $HF_ENDPOINT).

    --from takes the files of one data set, or those of several from folders of their names.

    \b
    dapo-math-17k   about 17,400 problems with integer answers, to train on
    aime-2024       30 problems
    aime-2025       30 problems
    retool-sft      2,000 solutions with code, for the cold start ('spear sft --preset retool')

    \b
      spear data get code
      spear data get code aime-2024 --from downloads
    """
    console = Console()
    for name in names or PUBLICATIONS:
        item = PUBLICATIONS[name]
        given = source / name if source is not None and (source / name).is_dir() else source
        if given is not None and given == source and len(set(names)) != 1:  # all would count for each of them
            raise click.UsageError(f"{source} has no folder {name}: name one data set, or give a folder for each.")
        if given is not None:
            files = list_given(given, item.pattern)
        else:
            files = list_remote(item.repository, item.folder, item.pattern)
        # Only the parquet files, if a repository has its problems in several forms.
        tables = [(file, path) for file, path in files if path.endswith(".parquet")]
        for file, path in tables or files:
            origin = given / path if given is not None and given.is_dir() else given
            fetch_locked(file, item.folder, source=origin, console=console)
        say(console, str(item.folder))


def expect_files() -> Iterator[Expected]:
    """Yield the sources of the data sets; only the hub knows the names of the files."""
    for item in PUBLICATIONS.values():
        yield Expected(f"code/{item.name}/", locate_page(item.repository), repository=item.repository)


def list_collections() -> Iterator[Collection]:
    """Yield the data sets of the environment: each benchmark, and combinations of benchmarks."""
    for name, splits in PUBLISHED.items():
        items = [BENCHMARKS[part] for part in splits.values()]
        missing = [item.name for item in items if not list_files(item)]
        suffixes = {path.suffix for item in items for path in list_files(item)}
        tables = ".parquet" in suffixes or any("parquet" in BENCHMARKS[part].pattern for part in missing)
        wanted = " ".join(missing or [item.name for item in items])
        yield Collection(name, not missing, f"spear data get code {wanted}", ("pyarrow",) if tables else ())


@click.command()
@_NAMES
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> None:
    """Check the checksums of what was fetched, count problems and solutions, and print the problems' fingerprints.

    Exit code 1 if a file is damaged or a data set lacks the published number of problems or solutions, 3 if nothing is
    here.

    \b
      spear data verify code
    """
    conclude({"code": partial(inspect_all, names=names)}, as_json)


def inspect_all(console: Console, names: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Yield what is found in the checksums and numbers of the data sets here. Raises AbsentDataError without one."""
    present = [PUBLICATIONS[name] for name in names or PUBLICATIONS if PUBLICATIONS[name].folder.is_dir()]
    if not present:
        raise AbsentDataError(f"{data_folder() / 'code'} has none of it: 'spear data get code' fetches it.")
    for name in names:
        if PUBLICATIONS[name] not in present:
            yield Finding(name, f"{name} is missing: 'spear data get code {name}' fetches it")
    table = Table(title="problems, each counted once")
    for column in ("dataset", "split", "rows", "problems", "contradicted", "fingerprint"):
        table.add_column(column, no_wrap=True)
    for item in present:
        findings = [inspect_file(path, console) for path in list_files(item)]
        yield from findings
        if any(finding.fault for finding in findings):
            continue
        yield _count_problems(item, table) if isinstance(item, Benchmark) else _count_solutions(item)
    if table.row_count:
        show_table(console, table)


def _count_solutions(item: Publication) -> Finding:
    rows = chain.from_iterable(
        parse_rows(path, "sandbox", lambda row, _: row, noun="solution", example='{"messages": […]}')
        for path in list_files(item)
    )
    count = sum(1 for _ in rows)
    return Finding(item.name, "" if count == item.count else f"{item.name}: {count} solutions instead of {item.count}")


def _count_problems(item: Benchmark, table: Table) -> Finding:
    found = read_benchmark(item)
    count = len(found.problems)
    fingerprint = open_benchmark(item.name, item.split).fingerprint[:12] if count else "–"
    rows, due = f"{found.rows:,}", f" ({item.count})" if item.count else ""
    table.add_row(item.name, item.split, rows, f"{count:,}{due}", str(found.contradicted), fingerprint)
    wrong = item.count not in (None, count)
    return Finding(
        f"{item.name}/{item.split}", f"{item.name}: {count} problems instead of {item.count}" if wrong else ""
    )
