"""``spear envs``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from spear_envs.cli import import_modules
from spear_envs.core.errors import SpearError
from spear_envs.data.files import data_folder
from spear_sandbox.console import echo

if TYPE_CHECKING:
    from rich.table import Table

    from spear_envs.catalogue import EnvListing


IDS, SPLITS = 35, 12
"""Widths of our ids and splits, which leave just enough of 80 columns."""
FOOTER = (
    "Those of spear_envs play embedded tasks without a download.",
    "Official data: spear data get NAME. An extra: pip install 'spear-envs[NAME]'.",
)


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
    from spear_envs.catalogue import list_envs, list_module_envs

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
        table.add_row(name, "\n".join(listing.splits), Text(_tell_extra(listing)), Text(_tell_data(listing)))
    return table


def _tell_extra(listing: EnvListing) -> str:
    if listing.extra is None:
        return "none needed"
    state = "not installed" if listing.extra.missing else "installed"
    return f"{listing.extra.requirement.partition('[')[2].rstrip(']')}: {listing.extra.unlocks} ({state})"


def _tell_data(listing: EnvListing) -> str:
    here = [collection.name for collection in listing.collections if collection.here]
    if listing.dataset is None:
        return "none needed"
    if not here:
        return f"{listing.dataset}: embedded tasks only"
    names = ", ".join(here) if len(here) < 4 else f"{len(here)} of {len(listing.collections)}"
    return f"{listing.dataset}: {names} here"
