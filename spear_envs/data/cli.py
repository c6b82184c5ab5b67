"""``spear data``: fetching, building and checking the data of environments.

The commands of a data set belong to its environment and are imported only when they run; this module knows their names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import click

from spear_envs.cli import LazyGroup
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.data.files import data_folder, is_offline
from spear_envs.data.space import format_bytes

__all__ = ["DATASETS", "Dataset", "data", "source_option"]


@dataclass(frozen=True)
class Dataset:
    """What ``spear data`` knows of the data of one environment."""

    name: str
    """Also the name of its folder in the data folder."""
    summary: str
    commands: dict[str, str] = field(default_factory=dict)
    """Verb (get, build, check) to ``"module:click command"``."""


DATASETS: tuple[Dataset, ...] = (
    Dataset(
        "alfworld",
        "ALFWorld: the official games (3,553 train, 140 and 134 valid).",
        {"get": "spear_envs.alfworld.data_cli:get", "check": "spear_envs.alfworld.data_cli:check"},
    ),
    Dataset(
        "code",
        "Code interpreter: DAPO-Math-17k, AIME 2024 and 2025.",
        {verb: f"spear_envs.code.data_cli:{verb}" for verb in ("get", "check")},
    ),
    Dataset(
        "search",
        "Search-R1: questions of the seven benchmarks, training questions, wiki-18 and its indexes.",
        {verb: f"spear_envs.search.data_cli:{verb}" for verb in ("get", "check")},
    ),
    Dataset(
        "webshop",
        "WebShop: catalogues of 1,000 and 1.18 million products.",
        {verb: f"spear_envs.webshop.data_cli:{verb}" for verb in ("get", "build", "check")},
    ),
)
"""Data sets with commands of their own; one entry each."""

VERBS = {
    "get": "Download the files of a data set, or take them from a folder.",
    "build": "Make fetched files into what an environment opens.",
    "check": "Count and check what is there.",
}

source_option = click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="Folder that holds the files already, or the file itself; nothing is downloaded.",
)
"""``--from`` as every ``spear data get`` has it; arrives as ``source: Path | None``."""


@click.group()
def data() -> None:
    """Fetch, build and check the data of environments.

    Data lies in $SPEAR_DATA, else in the user's cache folder; 'spear data path' prints it. With SPEAR_OFFLINE=1 nothing
    is downloaded.
    """


def _add_verb(verb: str) -> None:
    def find() -> dict[str, EntryPoint]:
        return {
            dataset.name: EntryPoint(dataset.name, dataset.commands[verb], f"spear.data.{verb}")
            for dataset in DATASETS
            if verb in dataset.commands
        }

    summaries = {dataset.name: dataset.summary for dataset in DATASETS}
    data.add_command(LazyGroup(verb, find=find, summaries=summaries, help=VERBS[verb], heading="Data sets"))


for _verb in VERBS:
    _add_verb(_verb)


def _find_dataset(name: str) -> Dataset:
    for dataset in DATASETS:
        if dataset.name == name:
            return dataset
    known = [dataset.name for dataset in DATASETS]
    raise SpearError(f"there is no data set {name!r}.{suggest_name(name, known)} Known are {', '.join(known)}.")


@data.command()
@click.argument("name", required=False)
def path(name: str | None) -> None:
    """Print the data folder, or that of the data set NAME."""
    folder = data_folder()
    click.echo(folder / _find_dataset(name).name if name else folder)


@data.command(name="list")
def list_datasets() -> None:
    """List the data sets, their commands and what of them is here."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("data set", "what it is", "commands"):
        table.add_column(column)
    table.add_column("here", justify="right", no_wrap=True)
    for dataset in DATASETS:
        size = _measure(data_folder() / dataset.name)
        here = "–" if size is None else format_bytes(size)
        table.add_row(Text(dataset.name), Text(dataset.summary), ", ".join(dataset.commands), here)
    console.print(table)
    offline = " (downloads are forbidden: SPEAR_OFFLINE)" if is_offline() else ""
    console.print(f"in {data_folder()}{offline}", soft_wrap=True, markup=False, highlight=False)


def _measure(folder: Path) -> int | None:
    """Bytes of all files in a folder; None if there is no folder."""
    if not folder.is_dir():
        return None
    return sum(item.lstat().st_size for item in folder.rglob("*") if item.is_file())
