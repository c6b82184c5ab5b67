"""``spear panel`` and ``spear rescore``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from spear_agents.listing import print_rows
from spear_agents.options import TRUST
from spear_agents.panels.panel import OFFICIAL, export_panel, find_differences, open_panel, read_panel
from spear_agents.panels.rescore import format_percent, rescore_run
from spear_agents.statistics import plain_estimate
from spear_envs.cli import read_keywords
from spear_sandbox.console import echo
from spear_sandbox.foreign import show_entry
from spear_sandbox.terminal import Console

FOLDER = click.Path(path_type=Path, file_okay=False)
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
