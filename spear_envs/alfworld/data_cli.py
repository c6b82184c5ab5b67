"""``spear data get|verify alfworld``: fetching, counting and solving the published games."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import is_zipfile

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spear_envs.alfworld.gamefile import SUBTASKS, GameFile, GameRecord, TaskText, make_game, scan_split
from spear_envs.alfworld.oracle import is_winnable
from spear_envs.alfworld.tasks import OFFICIAL_COUNTS, OfficialTaskSet, find_data_folder, find_split
from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, data_folder, fetch_locked, unpack_archive
from spear_envs.data.cli import (
    AbsentDataError,
    Collection,
    Expected,
    Finding,
    conclude,
    expect,
    inspect_file,
    json_option,
    source_option,
)
from spear_envs.data.progress import say, show_table
from spear_sandbox.console import FilePath
from spear_sandbox.terminal import Console, Progress

_ADDRESS = "https://github.com/alfworld/alfworld/releases/download"
_MOST_SHOWN = 10


def _describe(release: str, name: str) -> RemoteFile:
    url = f"{_ADDRESS}/{release}/{name}"
    return RemoteFile(name, url, manual=f"Open {url} in a browser.")


# Not tried against GitHub: sizes and checksums are recorded at the first download. Release 0.2.2 also has
# json_2.1.1_pddl.zip, which neither alfworld's environment nor ours reads.
ARCHIVES: tuple[RemoteFile, ...] = (
    _describe("0.4.0", "json_2.1.2_tw-pddl.zip"),
    _describe("0.2.2", "json_2.1.1_json.zip"),
)
"""The archives of alfworld/alfworld with the games (``game.tw-pddl``) and their sources (``traj_data.json``). Each game
needs one file of both."""


@click.command()
@source_option
def get(source: Path | None) -> None:
    """Fetch the official games: 3,553 to train on, 140 and 134 to validate.

    Interrupted downloads resume; unpacking again repairs broken files. With --from FOLDER the two archives are taken
    from there; with --from FILE any one archive with game files is unpacked.

    \b
      spear data get alfworld
      spear data get alfworld --from downloads
    """
    console = Console()
    base = data_folder() / "alfworld"
    if source is not None and source.is_file() and source.name not in {archive.name for archive in ARCHIVES}:
        unpack_archive(source, base, console=console)
    else:
        wanted = [one for one in ARCHIVES if source is None or source.is_dir() or source.name == one.name]
        place = base / "archives"
        archives = [fetch_locked(one, place, check=_require_zip, source=source, console=console) for one in wanted]
        for archive in archives:
            unpack_archive(archive, base, console=console)
        say(console, f"The archives stay in {base / 'archives'}.")
    reports = [report_split(base, split, lambda records: ()) for split in OFFICIAL_COUNTS]
    reports = [report for report in reports if report.tasks is not None]
    if not reports:
        raise SpearError(f"{base} has no game with its traj_data.json after unpacking: take other archives.")
    _print_table(console, reports)
    found, origin = find_data_folder(None)
    if found != base:
        say(
            console,
            f"{origin} is set to {found}, so environments look there: pass data_dir={str(base)!r}, or unset it.",
        )
    say(console, "'spear data verify alfworld' reads every game.")


def _require_zip(path: Path) -> None:
    """Raise unless the file ends as a ZIP archive."""
    if not is_zipfile(path):
        raise SpearError(
            f"the downloaded {path.name} is not a zip archive and was deleted: try again later, or name the folder"
            " that holds one: --from FOLDER."
        )


def expect_files() -> Iterator[Expected]:
    """Return the two archives."""
    return (expect("alfworld/archives", archive) for archive in ARCHIVES)


def list_collections() -> Iterator[Collection]:
    """Yield the official games; they are here if every split has some, wherever ``$ALFWORLD_DATA`` points."""
    try:
        here = all(find_split(None, split) for split in OFFICIAL_COUNTS)
    except SpearError:
        here = False
    yield Collection("official", here, "spear data get alfworld")


@click.command()
@click.option("--dir", "folder", type=FilePath(), help="Folder of the games, as for data_dir=.")
@json_option
def verify(folder: Path | None, as_json: bool) -> None:
    """Count the official games of each split and type, and read and solve every one.

    Exit code 1 if a split is not as published, or a game cannot be read or solved; 3 if there are none.

    \b
      spear data verify alfworld
    """
    conclude({"alfworld": partial(inspect_all, folder=folder)}, as_json)


def inspect_all(console: Console, folder: Path | None = None) -> Iterator[Finding]:
    """Yield what is found in the archives and every game of a folder (None: where environments look).

    Raises AbsentDataError if there is no game.
    """
    base, origin = find_data_folder(folder)
    say(console, f"{base} ({origin})")
    reports = [report_split(folder, split, _track(console, f"reading {split}")) for split in OFFICIAL_COUNTS]
    if all(report.tasks is None for report in reports):
        raise AbsentDataError(reports[0].problem)
    for archive in ARCHIVES:
        if folder is None and (path := data_folder() / "alfworld" / "archives" / archive.name).is_file():
            yield inspect_file(path, console)
    _print_table(console, [report for report in reports if report.tasks is not None])
    for report in reports:
        faults = report.list_faults()
        yield from (Finding(report.split, fault) for fault in faults)
        if not faults:
            yield Finding(report.split)
        if report.left_out:
            say(console, f"{report.split}, left out: {report.left_out}")


def _track(console: Console, what: str) -> Callable[[Iterable[GameRecord]], Iterable[GameRecord]]:
    def track(records: Iterable[GameRecord]) -> Iterator[GameRecord]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(list(records), description=what)

    return track


@dataclass(frozen=True)
class SplitReport:
    """What was found of one split."""

    split: str
    tasks: OfficialTaskSet | None
    """None if nothing was found."""
    problem: str = ""
    """Reason why nothing was found."""
    broken: tuple[tuple[str, str], ...] = ()
    """Path and fault of each game that cannot be read or won."""
    left_out: str = ""
    """Numbers of games that were left out, with the reasons."""

    @property
    def counts(self) -> Counter[str]:
        """Return the number of games of each subtask."""
        return Counter(task.subtask for task in self.tasks or ())

    def list_faults(self) -> list[str]:
        """List deviations from what was published; at most ten broken games."""
        if self.tasks is None:
            return [f"{self.split}: {self.problem}"]
        expected = OFFICIAL_COUNTS[self.split]
        lines = [
            f"{self.split}: {self.counts[name]} games of type {name} instead of {expected.get(name, 0)}"
            for name in sorted(self.counts.keys() | expected.keys())
            if self.counts[name] != expected.get(name, 0)
        ]
        lines += [f"{self.split}: {path}: {fault}" for path, fault in self.broken[:_MOST_SHOWN]]
        more = len(self.broken) - _MOST_SHOWN
        return [*lines, f"{self.split}: and {more:,} more such games"] if more > 0 else lines


def report_split(
    data_dir: Path | None, split: str, watch: Callable[[Iterable[GameRecord]], Iterable[GameRecord]]
) -> SplitReport:
    """Count the games of one split by task type, and those that the expert does not win or that differ.

    Args:
        data_dir: as for :func:`~spear_envs.alfworld.tasks.find_split`.
        watch: yields the games of a list that are to be read and solved.
    """
    try:
        folder = find_split(data_dir, split)
        listing = scan_split(folder.path, folder.elsewhere)
    except SpearError as error:
        return SplitReport(split, None, str(error))
    left_out = "; ".join(f"{count:,} × {reason.value}" for reason, count in sorted(listing.left_out.items()))
    if not listing.games:
        return SplitReport(split, None, f"no game in {folder.path} belongs to it ({left_out})")
    tasks = OfficialTaskSet(folder, split, TaskText.TEMPLATE, listing)
    faults = ((record.path, _find_fault(tasks.games[i], record)) for i, record in enumerate(watch(listing.games)))
    return SplitReport(split, tasks, "", tuple((path, fault) for path, fault in faults if fault), left_out)


def _find_fault(source: GameFile, record: GameRecord) -> str:
    if record.fault:
        return record.fault
    try:
        return "" if is_winnable(make_game(source.read())) else "the expert does not win it"
    except SpearError as error:
        return str(error).removeprefix(f"{source} ")


def _print_table(console: Console, reports: list[SplitReport]) -> None:
    table = Table(title="games found (published)")
    for name in ("split", "all", *SUBTASKS, "fingerprint"):
        table.add_column(name, justify="left" if name in ("split", "fingerprint") else "right", no_wrap=True)
    for report in reports:
        assert report.tasks is not None
        counts, expected = report.counts, OFFICIAL_COUNTS[report.split]
        cells = [(len(report.tasks), sum(expected.values())), *((counts[name], expected[name]) for name in SUBTASKS)]
        table.add_row(
            report.split,
            *(
                Text(f"{found:,}" if found == due else f"{found:,} ({due:,})", style="" if found == due else "red")
                for found, due in cells
            ),
            report.tasks.fingerprint[:12],
        )
    if reports:
        show_table(console, table)
