"""``spear data``: fetching, building and verifying the data of environments.

The commands of a data set are in its environment and are imported only when they run; this module has their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spear_envs.cli import LazyGroup
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.data.files import data_folder, is_offline
from spear_envs.data.listing import FileEntry, list_files, measure
from spear_envs.data.locking import unlock as unlock_all
from spear_envs.data.progress import say
from spear_envs.data.space import format_bytes
from spear_envs.data.verification import JSON_HELP, conclude
from spear_sandbox.console import echo

if TYPE_CHECKING:
    from spear_sandbox.terminal import Console


@dataclass(frozen=True)
class Dataset:
    """What ``spear data`` knows of the data of one environment."""

    name: str
    """Also the name of its folder in the data folder."""
    summary: str
    commands: dict[str, str]
    """Verb (get, build, verify) to ``"module:click command"``."""
    expect: str
    """``"module:function"`` that gives the :class:`~spear_envs.data.listing.Expected` files."""
    inspect: str
    """``"module:function"`` that looks at all that is here, an :data:`~spear_envs.data.verification.Inspect`."""
    collections: str
    """``"module:function"`` that lists the :class:`~spear_envs.data.listing.Collection` objects to choose from."""

    def load(self, target: str) -> Any:
        """Import ``"module:name"``."""
        return EntryPoint(self.name, target, "spear.data").load()


def _describe(name: str, summary: str, *verbs: str) -> Dataset:
    module = f"spear_envs.{name}.data_cli"
    commands = {verb: f"{module}:{verb}" for verb in verbs}
    functions = (f"{module}:{name}" for name in ("expect_files", "inspect_all", "list_collections"))
    return Dataset(name, summary, commands, *functions)


DATASETS: tuple[Dataset, ...] = (
    _describe("alfworld", "ALFWorld: the official games (3,553 train, 140 and 134 valid).", "get", "verify"),
    _describe("code", "Code interpreter: DAPO-Math-17k, AIME 2024 and 2025.", "get", "verify"),
    _describe(
        "search",
        "Search-R1: questions of the seven benchmarks, training questions, wiki-18 and its indexes.",
        "get",
        "verify",
    ),
    _describe("webshop", "WebShop: catalogues of 1,000 and 1.18 million products.", "get", "build", "verify"),
)
"""Data sets with their own commands."""

VERBS = {
    "get": "Download the files of a data set, or take them from a folder.",
    "build": "Convert fetched files for an environment.",
    "verify": "Check local data, all of it or one data set.",
}

source_option = click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="Folder with the files, or the file itself; nothing is downloaded.",
)
"""``--from`` of every ``spear data get``, as ``source: Path | None``."""


mirror_option = click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    envvar="SPEAR_MIRROR",
    metavar="URL",
    help="Data folder that somebody serves, asked before the publisher; may be repeated. [$SPEAR_MIRROR]",
)
"""``--mirror`` of every ``spear data get``, as ``mirrors: tuple[str, ...]``."""


@click.group()
def data() -> None:
    """Fetch, build and verify the data of environments.

    Data is in $SPEAR_DATA, else in the user's cache folder; 'spear data path' prints it. With SPEAR_OFFLINE=1 nothing
    is downloaded.
    """


def _find_commands(verb: str) -> dict[str, EntryPoint]:
    return {
        dataset.name: EntryPoint(dataset.name, dataset.commands[verb], f"spear.data.{verb}")
        for dataset in DATASETS
        if verb in dataset.commands
    }


def _make_group(verb: str, **options: Any) -> LazyGroup:
    summaries = {dataset.name: dataset.summary for dataset in DATASETS}
    find = partial(_find_commands, verb)
    return LazyGroup(verb, find=find, summaries=summaries, help=VERBS[verb], heading="Data sets", **options)


@click.pass_context
def _verify_all(context: click.Context, as_json: bool) -> None:
    if context.invoked_subcommand is None:
        conclude({dataset.name: dataset.load(dataset.inspect) for dataset in DATASETS}, as_json)
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
    repositories = {item.repository for dataset in known for item in dataset.load(dataset.expect)()} - {None}
    released = unlock_all(what, repositories or {what})
    if not released:
        raise SpearError(f"nothing is locked under {what!r}: give a data set, or a line of {data_folder()}/lock.json.")
    for name in released:
        echo(name)


@data.command(name="list")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON of all files, the manifest.json of a mirror.")
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
                "commands": list(dataset.commands),
                "bytes": measure(data_folder() / dataset.name),
                "files": [entry.describe() for entry in _list_files(dataset)],
            }
            for dataset in chosen
        ]
        facts = {"folder": str(data_folder()), "offline": is_offline(), "datasets": described}
        echo(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    from spear_sandbox.terminal import Console

    console = Console()
    if name:
        _print_files(console, _list_files(chosen[0]))
    else:
        _print_datasets(console)
    offline = " (downloads are forbidden: SPEAR_OFFLINE)" if is_offline() else ""
    say(console, f"in {data_folder()}{offline}")


def _list_files(dataset: Dataset) -> list[FileEntry]:
    return list_files(dataset.name, dataset.load(dataset.expect)())


def _print_datasets(console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("data set", "what it is", "commands"):
        table.add_column(column)
    table.add_column("here", justify="right", no_wrap=True)
    for dataset in DATASETS:
        size = measure(data_folder() / dataset.name)
        here = "–" if size is None else format_bytes(size)
        table.add_row(Text(dataset.name), Text(dataset.summary), ", ".join(dataset.commands), here)
    console.print(table)


def _print_files(console: Console, entries: list[FileEntry]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from spear_envs.data.showing import show_table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("SHA-256", no_wrap=True)
    table.add_column("is", no_wrap=True)
    for entry in entries:
        size = "" if entry.size is None else f"{entry.size:,}"
        digest = f"{entry.sha256[:12]}…" if entry.sha256 else ""
        table.add_row(Text(entry.path), size, digest, entry.presence.value)
    show_table(console, table)
