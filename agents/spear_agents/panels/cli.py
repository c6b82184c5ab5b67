"""``spear panel``, ``spear rescore``, ``spear ledger`` and ``spear leaderboard``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from spear_agents.files import write_text
from spear_agents.listing import print_rows
from spear_agents.options import TRUST
from spear_agents.panels.ledger import (
    add_entry,
    check_again,
    check_entry,
    check_run,
    format_leaderboard,
    format_percent,
    read_entries,
)
from spear_agents.panels.panel import OFFICIAL, export_panel, find_differences, open_panel, read_panel
from spear_agents.panels.rescore import rescore_run
from spear_agents.panels.tables import fill_page
from spear_agents.statistics import plain_estimate
from spear_envs.cli import read_keywords
from spear_envs.core import SpearError
from spear_sandbox.console import echo
from spear_sandbox.foreign import show_entry
from spear_sandbox.terminal import Console

FOLDER = click.Path(path_type=Path, file_okay=False)
LEDGER = click.option("--ledger", type=FOLDER, default=Path("results"), help="Folder of the entries.")
MOST_TOLD = 10


@click.group()
def panel() -> None:
    """Fixed tasks with a protocol: list, export, verify."""


@panel.command("list")
def list_panels() -> None:
    """List the official panels; spear eval --panel NAME plays one.

    \b
      spear panel list
    """
    rows = []
    for each in OFFICIAL.values():
        title = f"{each.title}{f' ({each.data})' if each.data else ''}"
        rows.append(((each.name, f"{each.env_id} {each.split}", str(each.protocol.samples)), title))
    print_rows(Console(), ("panel", "tasks of", "samples"), rows)


@panel.command("export")
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: NAME.json.")
def export(name: str, out: Path | None) -> None:
    """Write panel NAME as one JSON file.

    It holds the tasks, their fingerprint and the protocol.

    \b
      spear panel export sokoban-tiny --out sokoban-tiny.json
    """
    path = out or Path(f"{name}.json")
    digest = export_panel(open_panel(name), path)
    echo(f"{path}: panel {digest}")


@panel.command("verify")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@TRUST
def verify_panel(file: Path, trust: bool) -> None:
    """Check whether the installed code reproduces a panel's FILE.

    Tasks and prompts are compared. Exit code 1 if one differs.

    \b
      spear panel verify sokoban-tiny.json
    """
    found, written = read_panel(file, trust=trust)
    told = find_differences(written, found)
    for line in told:
        echo(show_entry(line))
    if told:
        raise SystemExit(1)
    echo(f"{file}: {len(written['tasks'])} tasks, prompts and turn limit match this code.")


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--env", "pairs", multiple=True, metavar="KEY=VALUE", help="Another keyword, such as another grader.")
@click.option("--json", "as_json", is_flag=True, help="Figures for programs.")
@TRUST
def rescore(run: Path, pairs: tuple[str, ...], as_json: bool, trust: bool) -> None:
    """Play the recorded responses of RUN (a folder of spear eval --out) again and compare every reward.

    Exit code 1 if one differs. With --env the episodes are scored differently, and differences do not fail.

    \b
      spear rescore runs/first
      spear rescore runs/aime --env grader=math_verify
    """
    changes = read_keywords(pairs)
    found = rescore_run(run, changes, trust=trust)
    if as_json:
        figures = {
            "episodes": found.episodes,
            "faults": found.faults,
            "differences": list(found.differences),
            "recorded": plain_estimate(found.recorded),
            "replayed": plain_estimate(found.replayed),
        }
        echo(json.dumps(figures, indent=2))
    else:
        for line in found.differences[:MOST_TOLD]:
            echo(show_entry(line))
        if len(found.differences) > MOST_TOLD:
            echo(f"and {len(found.differences) - MOST_TOLD:,} more")
        left_out = f", {found.faults} left out since a service failed" if found.faults else ""
        echo(
            f"{found.episodes:,} episodes{left_out}: {len(found.differences):,} values differ; success"
            f" {format_percent(found.replayed)}, recorded {format_percent(found.recorded)}"
        )
    if found.differences and not changes:
        raise SystemExit(1)


@click.group()
def ledger() -> None:
    """Results that can be checked: add a run, verify all entries."""


@ledger.command("add")
@click.argument("run", type=FOLDER)
@click.option("--panel", "panel_name", required=True, help="Official panel, or the file of one.")
@click.option("--name", required=True, help="Name of the entry.")
@click.option("--model", help="What the model is called; default: the end of its path.")
@click.option("--notes", default="", show_default=False, help="A sentence for readers.")
@click.option("--publish", is_flag=True, help="Copy the model next to the entry, for others to play it.")
@LEDGER
def add(run: Path, panel_name: str, name: str, model: str | None, notes: str, publish: bool, ledger: Path) -> None:
    """Write the entry of RUN, a folder of spear eval --panel … --out.

    \b
      spear ledger add runs/first --panel sokoban-tiny --name my-model-1
    """
    echo(add_entry(run, panel_name, name, ledger, model=model, notes=notes, publish=publish))


@ledger.command("verify")
@click.argument("names", nargs=-1)
@LEDGER
@click.option("--play", is_flag=True, help="Also play scripted players and published models again.")
@click.option("--run", type=FOLDER, help="Check whether your own run is within the interval of the one entry named.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A leaderboard that must be the ledger's.",
)
def verify_ledger(names: tuple[str, ...], ledger: Path, play: bool, run: Path | None, page: Path | None) -> None:
    """Recompute every figure of the ledger, or of the entries NAMES.

    Exit code 1 if one does not match.

    \b
      spear ledger verify
      spear ledger verify my-model-1 --run runs/mine
    """
    every = list(read_entries(ledger))
    entries = [entry for entry in every if not names or entry.name in names]
    if unknown := set(names) - {entry.name for entry in entries}:
        known = ", ".join(entry.name for entry in every)
        raise SpearError(f"{sorted(unknown)[0]!r} is not an entry of {ledger}, which has {known}.")
    if run is not None and len(entries) != 1:
        raise SpearError("--run needs the name of one entry.")
    failed = 0
    for entry in entries:
        told = check_entry(entry)
        fits, words = (check_again(entry, ledger) if play else None) or (True, "")
        if not fits:
            told.append(words)
        failed += bool(told)
        holds = f"holds, {format_percent(entry.recompute())}" + (f" ({words})" if words else "")
        echo(f"{entry.name}: {'; '.join(told) or holds}")
    if run is not None:
        fits, words = check_run(entries[0], run)
        failed += not fits
        echo(f"{run}: {words}")
    if page is not None and page.read_text(encoding="utf-8") != format_leaderboard(every):
        failed += 1
        echo(f"{page} does not match this ledger: run spear leaderboard --out {page}")
    if failed:
        raise SystemExit(1)


@ledger.command("fill")
@click.argument("page", type=click.Path(path_type=Path, dir_okay=False))
@LEDGER
def fill(page: Path, ledger: Path) -> None:
    """Update the tables of PAGE from the ledger.

    A table follows a comment <!-- ledger: BEFORE AFTER OTHERS… -->.

    \b
      spear ledger fill README.md
    """
    if not page.is_file():
        raise SpearError(f"{page} does not exist: give a page in Markdown.")
    text = page.read_text(encoding="utf-8")
    filled = fill_page(text, {entry.name: entry for entry in read_entries(ledger)})
    if filled != text:
        write_text(page, filled)
    echo(f"{page}: {'updated' if filled != text else 'unchanged'}")


@click.command()
@LEDGER
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File of the page; default: print it.")
def leaderboard(ledger: Path, out: Path | None) -> None:
    """Write the ledger as a page in Markdown, a table for each panel.

    \b
      spear leaderboard --out leaderboard.md
    """
    text = format_leaderboard(list(read_entries(ledger)))
    if out is None:
        echo(text, nl=False)
    else:
        write_text(out, text)
