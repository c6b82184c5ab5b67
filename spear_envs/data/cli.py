"""``spear data``: fetching, building, listing and verifying the data of environments.

The commands of a data set are in its environment and are imported only when they run; this module has their names, and
what they share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from spear_envs.cli import LazyGroup
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.data.fetching import find_digest, find_revision, list_locked, pin
from spear_envs.data.fetching import unlock as unlock_all
from spear_envs.data.files import RemoteFile, data_folder, find_fault, format_bytes, is_offline
from spear_envs.data.progress import count_bytes, say, show_bytes
from spear_sandbox.console import FilePath, echo

if TYPE_CHECKING:
    from rich.table import Table

    from spear_sandbox.terminal import Console


@dataclass(frozen=True)
class Dataset:
    """What ``spear data`` knows of the data of one environment."""

    name: str
    """Name; also of its folder in the data folder."""
    summary: str
    verbs: tuple[str, ...] = ("get", "verify")

    def load(self, name: str) -> Any:
        """Import from the environment's commands.

        Args:
            name: a verb (the click command), ``expect_files`` (gives :class:`Expected` files), ``inspect_all`` (an
                :data:`Inspect`) or ``list_collections`` (lists the :class:`Collection` objects to choose from).
        """
        return self.find(name).load()

    def find(self, name: str) -> EntryPoint:
        """Return where :meth:`load` finds something."""
        return EntryPoint(self.name, f"spear_envs.{self.name}.data_cli:{name}", "spear.data")


DATASETS: tuple[Dataset, ...] = (
    Dataset("alfworld", "ALFWorld: the official games (3,553 train, 140 and 134 valid)."),
    Dataset("code", "Code interpreter: DAPO-Math-17k, AIME 2024 and 2025, ReTool-SFT."),
    Dataset("search", "Search-R1: questions of the seven benchmarks, training questions, wiki-18 and its indexes."),
    Dataset("webshop", "WebShop: catalogues of 1,000 and 1.18 million products.", ("get", "build", "verify")),
)
"""Data sets with their own commands."""

VERBS = {
    "get": "Download the files of a data set, or take them from a folder.",
    "build": "Convert fetched files for an environment.",
    "verify": "Check local data, all of it or one data set.",
}
JSON_HELP = "JSON on stdout; everything else goes to stderr."

source_option = click.option(
    "--from",
    "source",
    type=FilePath(exists=True),
    help="Folder with the files, or the file itself; nothing is downloaded.",
)
"""``--from`` of every ``spear data get``, as ``source: Path | None``."""
json_option = click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
"""``--json`` of every ``spear data verify``, as ``as_json: bool``."""


@dataclass(frozen=True)
class Expected:
    """A file of an environment's data set."""

    path: str
    """Path in the data folder; a folder with a trailing slash if only the publisher knows the names of the files."""
    source: str
    """Address at which it is published."""
    size: int | None = None
    """Bytes, if known in advance."""
    sha256: str | None = None
    repository: str | None = None
    """Repository on the hub."""


@dataclass(frozen=True)
class Collection:
    """Official data, by the name in an environment's keyword or in a command."""

    name: str
    """Name, such as ``"aime-2024"``."""
    here: bool
    """Whether it can be opened now; ``spear data verify`` checks it."""
    command: str
    """Command to run if it is not here."""
    packages: tuple[str, ...] = ()
    """Modules beyond the base installation that reading it needs."""


class AbsentDataError(SpearError):
    """Nothing of a data set is here."""


class _NothingError(click.ClickException):
    exit_code = 3


@dataclass(frozen=True)
class Finding:
    """One checked thing."""

    subject: str
    """A file, or a part of the data set."""
    fault: str = ""
    """Its fault, if any."""


Inspect: TypeAlias = "Callable[[Console], Iterable[Finding]]"
"""Inspects the local files of a data set, with output to the console; raises AbsentDataError if there are none."""


def expect(folder: str, file: RemoteFile) -> Expected:
    """Describe a file with a fixed name in a folder of the data folder."""
    return Expected(f"{folder}/{file.name}", file.url, file.size, file.sha256)


def list_files(name: str, expected: Iterable[Expected]) -> list[dict[str, Any]]:
    """Describe the files of a data set for JSON, here or not, without those unpacked or built from them."""
    base = data_folder()

    def look(path: str) -> str:
        if (base / path).is_file():
            return "present"
        return "partial" if (base / f"{path}.part").is_file() else "absent"

    partial_ones = {item.relative_to(base).as_posix()[: -len(".part")] for item in (base / name).rglob("*.part")}
    noted = {path for path in {*list_locked(name), *partial_ones} if look(path) != "absent"}
    known: dict[str, Expected | None] = dict.fromkeys(noted)
    for item in expected:
        inside = [path for path in noted if path.startswith(item.path)] if item.path.endswith("/") else []
        known.update(dict.fromkeys(inside or [item.path], item))
    entries = []
    for path, source in sorted(known.items()):
        state = look(path)
        fixed = source if source is not None and source.path == path else None
        entries.append(
            {
                "path": path,
                "state": state,
                "size": (base / path).stat().st_size if state == "present" else fixed and fixed.size,
                "sha256": (fixed and fixed.sha256) or find_digest(base / path),
                "source": source and source.source,
                "revision": find_revision(source.repository) if source and source.repository else None,
            }
        )
    return entries


def measure(folder: Path) -> int | None:
    """Add up the bytes of all files in a folder; None if there is no folder."""
    if not folder.is_dir():
        return None
    return sum(item.lstat().st_size for item in folder.rglob("*") if item.is_file())


def inspect_file(path: Path, console: Console, file: RemoteFile | None = None) -> Finding:
    """Compare a fetched copy of ``file``, if known, with its locked checksum."""
    try:
        pinned = pin(file or RemoteFile(path.name), path.parent)
        with show_bytes(console) as show:
            fault, _ = find_fault(pinned, path, count_bytes(show, f"checking {path.name}", path.stat().st_size))
    except (SpearError, OSError) as error:
        return Finding(str(path), str(error))
    return Finding(str(path), fault and f"{path} is not the expected file ({fault})")


def conclude(inspections: Mapping[str, Inspect], as_json: bool) -> None:
    """Inspect data sets and print what was found.

    Args:
        inspections: by the name of the data set.
        as_json: print a JSON array, an object for each data set, to stdout, and everything else to stderr.

    Raises:
        click.ClickException: something is damaged (exit code 1), or nothing is here (3).
    """
    from spear_sandbox.terminal import Console

    console = Console(stderr=as_json)
    results: list[dict[str, Any]] = []
    absence = "nothing is here: 'spear data get' fetches it."
    for name, inspect in inspections.items():
        findings: list[Finding] = []
        state = "whole"
        try:
            findings.extend(inspect(console))
        except AbsentDataError as error:
            state = "absent"
            if len(inspections) > 1:
                say(console, f"{name}: nothing is here")
            else:
                absence = str(error)
        except SpearError as error:  # stops the inspection
            findings.append(Finding("", str(error)))
        state = "damaged" if any(finding.fault for finding in findings) else state
        results.append({"dataset": name, "state": state, "findings": [asdict(finding) for finding in findings]})
        for finding in findings:
            say(console, f"{name}: {finding.fault or f'{finding.subject} is as it should be'}")
    if as_json:
        echo(json.dumps(results, indent=1))
    if damaged := [one["dataset"] for one in results if one["state"] == "damaged"]:
        mend = f"Delete what is damaged; 'spear data get {damaged[0]}' fetches and mends."
        raise click.ClickException(f"{' and '.join(damaged)}: not all of it is as it should be. {mend}")
    if all(one["state"] == "absent" for one in results):
        raise _NothingError(absence)


@click.group()
def data() -> None:
    """Fetch, build and verify the data of environments.

    Data is in $SPEAR_DATA, else in the user's cache folder; 'spear data path' prints it. With SPEAR_OFFLINE=1 nothing
    is downloaded.
    """


def _make_group(verb: str, **options: Any) -> LazyGroup:
    summaries = {dataset.name: dataset.summary for dataset in DATASETS}

    def find() -> dict[str, EntryPoint]:
        return {dataset.name: dataset.find(verb) for dataset in DATASETS if verb in dataset.verbs}

    return LazyGroup(verb, find=find, summaries=summaries, help=VERBS[verb], heading="Data sets", **options)


@click.pass_context
def _verify_all(context: click.Context, as_json: bool) -> None:
    if context.invoked_subcommand is None:
        conclude({dataset.name: dataset.load("inspect_all") for dataset in DATASETS}, as_json)
    elif as_json:
        raise click.UsageError("put --json after the name of the data set.")


data.add_command(_make_group("get"))
data.add_command(_make_group("build"))
_json = click.Option(["--json", "as_json"], is_flag=True, help=JSON_HELP)
data.add_command(_make_group("verify", invoke_without_command=True, callback=_verify_all, params=[_json]))


def _find_dataset(name: str) -> Dataset:
    for dataset in DATASETS:
        if dataset.name == name:
            return dataset
    known = [dataset.name for dataset in DATASETS]
    raise SpearError(f"there is no data set {name!r}.{suggest_name(name, known)} Known are {', '.join(known)}.")


@data.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON, including whether the folder exists.")
def path(name: str | None, as_json: bool) -> None:
    """Print the data folder, or that of the data set NAME.

    \b
      spear data path
    """
    folder = data_folder() / _find_dataset(name).name if name else data_folder()
    echo(json.dumps({"path": str(folder), "exists": folder.is_dir()}) if as_json else folder)


@data.command()
@click.argument("what", metavar="NAME|PATH|REPOSITORY")
def unlock(what: str) -> None:
    """Accept a change of published files.

    NAME is a data set, a file, or a repository on the hub.

    The first 'spear data get' locks what it fetches in lock.json of the data folder, and other bytes are then refused.
    This removes the lock; the next 'get' takes and locks what is published then. Local files are kept.

    \b
      spear data unlock webshop
    """
    known = [dataset for dataset in DATASETS if dataset.name == what]
    repositories = {item.repository for dataset in known for item in dataset.load("expect_files")()} - {None}
    released = unlock_all(what, repositories or {what})
    if not released:
        raise SpearError(f"nothing is locked under {what!r}: give a data set, or a line of {data_folder()}/lock.json.")
    for name in released:
        echo(name)


@data.command(name="list")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON of all files.")
def list_datasets(name: str | None, as_json: bool) -> None:
    """List the data sets, or the files of the data set NAME.

    Files are listed with size, SHA-256 and whether they are here.

    \b
      spear data list
      spear data list webshop --json
    """
    chosen = [_find_dataset(name)] if name else DATASETS
    if as_json:
        described = [
            {
                "name": dataset.name,
                "summary": dataset.summary,
                "commands": list(dataset.verbs),
                "bytes": measure(data_folder() / dataset.name),
                "files": list_files(dataset.name, dataset.load("expect_files")()),
            }
            for dataset in chosen
        ]
        facts = {"folder": str(data_folder()), "offline": is_offline(), "datasets": described}
        echo(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    from spear_envs.data.progress import show_table
    from spear_sandbox.terminal import Console

    console = Console()
    show_table(console, _tabulate_files(chosen[0]) if name else _tabulate_datasets())
    offline = " (downloads are forbidden: SPEAR_OFFLINE)" if is_offline() else ""
    say(console, f"in {data_folder()}{offline}")


def _tabulate_datasets() -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("data set", "what it is", "commands", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("here", justify="right", no_wrap=True)
    for dataset in DATASETS:
        size = measure(data_folder() / dataset.name)
        table.add_row(
            dataset.name, dataset.summary, ", ".join(dataset.verbs), "–" if size is None else format_bytes(size)
        )
    return table


def _tabulate_files(dataset: Dataset) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("file", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("bytes", justify="right")
    table.add_column("SHA-256")
    table.add_column("is")
    for entry in list_files(dataset.name, dataset.load("expect_files")()):
        size = "" if entry["size"] is None else f"{entry['size']:,}"
        digest = f"{entry['sha256'][:12]}…" if entry["sha256"] else ""
        table.add_row(Text(entry["path"]), size, digest, entry["state"])
    return table
