"""``spear envs``: the available environments, and the extras and official data that they lack."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from spear_envs.cli import import_modules
from spear_envs.core.env import SpearEnv
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_creator, list_registered
from spear_envs.core.registration import ENVIRONMENTS, PREFIX, EnvEntry
from spear_envs.data.cli import DATASETS, Collection, Dataset
from spear_envs.data.files import data_folder
from spear_envs.doctor import find_version, read_requirements
from spear_sandbox.console import echo

if TYPE_CHECKING:
    from rich.table import Table

DISTRIBUTION = "spear-envs"
IDS, SPLITS = 35, 12
"""Widths of our ids and splits, which leave just enough of 80 columns."""
FOOTER = (
    "Those of spear_envs play embedded tasks without a download.",
    "Official data: spear data get NAME. An extra: pip install 'spear-envs[NAME]'.",
)


@dataclass(frozen=True)
class ExtraState:
    """An extra that unlocks more of an environment."""

    requirement: str
    """Requirement for pip, such as ``"spear-envs[search]"``."""
    unlocks: str
    missing: tuple[str, ...]
    """Distributions of the extra that are not installed."""


@dataclass(frozen=True)
class EnvListing:
    """An environment in a list."""

    id: str
    """Id for ``gym.make`` in a fresh process, such as ``"spear_envs:spear/WebShop-v0"``."""
    short_id: str
    """Id as registered, and for commands."""
    summary: str
    splits: tuple[str, ...]
    """Splits of the tasks that do not need a download."""
    extra: ExtraState | None = None
    dataset: str | None = None
    """Name of its official data in ``spear data``, if it has any."""
    collections: tuple[Collection, ...] = ()
    """Parts of the official data, here or not."""


def list_envs() -> list[EnvListing]:
    """List the environments of this package."""
    requirements = read_requirements()
    return [_list_env(entry, requirements) for entry in ENVIRONMENTS]


def _list_env(entry: EnvEntry, requirements: Mapping[str, Iterable[Any]]) -> EnvListing:
    extra = None
    if entry.extra is not None:
        requirement = f"{DISTRIBUTION}[{entry.extra}]"
        wanted = [one.name for one in requirements.get(requirement, ())]
        missing = tuple(name for name in wanted if find_version(name) is None)
        extra = ExtraState(requirement, entry.unlocks, missing)
    splits = tuple(find_creator(entry.id).splits)  # type: ignore[attr-defined]
    dataset = _find_dataset(entry.id)
    name = None if dataset is None else dataset.name
    collections = tuple(find_collections(entry.id))
    return EnvListing(f"{PREFIX}{entry.id}", entry.id, entry.summary, splits, extra, name, collections)


def find_collections(env_id: str) -> list[Collection]:
    """List the official data of one of our environments; empty for third-party ones."""
    dataset = _find_dataset(env_id)
    return [] if dataset is None else list(dataset.load("list_collections")())


def _find_dataset(env_id: str) -> Dataset | None:
    """Find a data set by the name of the environment's folder."""
    folder = next((entry.entry_point.split(".")[1] for entry in ENVIRONMENTS if entry.id == env_id), None)
    return next((dataset for dataset in DATASETS if dataset.name == folder), None)


def list_unreadable(collection: Collection) -> list[str]:
    """List missing modules that reading it needs."""
    return [name for name in collection.packages if importlib.util.find_spec(name) is None]


def list_module_envs(module: str) -> list[EnvListing]:
    """List the SPEAR environments of an imported module and its submodules.

    Raises:
        SpearError: an entry point cannot be imported.
    """
    listings = []
    for short_id in list_registered(module):
        creator = find_creator(short_id)
        if not inspect.isclass(creator) or issubclass(creator, SpearEnv):
            about = (inspect.getdoc(creator) or "No docstring.").splitlines()[0].replace("``", "")
            splits = tuple(getattr(creator, "splits", SpearEnv.splits))
            listings.append(EnvListing(f"{module}:{short_id}", short_id, about, splits))
    return listings


@click.command()
@click.option("--module", "modules", multiple=True, help="Module that registers environments; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def envs(modules: tuple[str, ...], as_json: bool) -> None:
    """List the environments: ours, and with --module those of a module.

    The names are for gym.make in a fresh process. Commands of spear also take our ids without 'spear_envs:'.

    \b
      spear envs
      spear envs --module my_package.corridor
    """
    import_modules(modules)
    listings = list_envs()
    for module in modules:
        if module == "spear_envs":  # listed already
            continue
        found = list_module_envs(module)
        if not found:
            raise SpearError(f"{module} does not register a SPEAR environment: call register_env in it.")
        listings += found
    if as_json:
        facts = {"data_folder": str(data_folder()), "environments": [asdict(listing) for listing in listings]}
        echo(json.dumps(facts, indent=1))
        return
    from spear_sandbox.terminal import Console

    console = Console()
    console.print(_make_table(listings, console.width))
    console.print()
    for line in FOOTER:
        console.print(line, highlight=False)


def _make_table(listings: list[EnvListing], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("environment", overflow="fold")
    table.add_column("splits", overflow="fold")
    rest = max(13, (width - IDS - SPLITS) // 2 - 3)
    table.add_column("extra", max_width=rest)
    table.add_column("official data", max_width=rest)
    for listing in listings:
        name = Text(listing.id, style="bold")
        name.append(f"\n{listing.summary}", style="not bold")
        table.add_row(name, "\n".join(listing.splits), Text(_describe_extra(listing)), Text(_describe_data(listing)))
    return table


def _describe_extra(listing: EnvListing) -> str:
    if listing.extra is None:
        return "none needed"
    state = "not installed" if listing.extra.missing else "installed"
    return f"{listing.extra.requirement.partition('[')[2].rstrip(']')}: {listing.extra.unlocks} ({state})"


def _describe_data(listing: EnvListing) -> str:
    here = [collection.name for collection in listing.collections if collection.here]
    if listing.dataset is None:
        return "none needed"
    if not here:
        return f"{listing.dataset}: embedded tasks only"
    names = ", ".join(here) if len(here) < 4 else f"{len(here)} of {len(listing.collections)}"
    return f"{listing.dataset}: {names} here"
