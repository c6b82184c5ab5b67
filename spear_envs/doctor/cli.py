"""``spear doctor``: the report."""

from __future__ import annotations

import json
import sys

import click

from spear_envs.doctor.findings import Check, Finding, Verdict, examine

__all__ = ["doctor"]

COLOURS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(as_json: bool) -> None:
    """Look at this installation and this machine, and say what to do where something is wrong.

    Exit code 1 if there is a problem; a note is none. Nothing is installed or changed.
    """
    findings = [finding for check in list_checks() for finding in examine(check)]
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "findings": [finding.describe() for finding in findings]}))
    else:
        _show(findings)
    if problems:
        sys.exit(1)


def list_checks() -> list[Check]:
    """All checks, in the order of the report."""
    from spear_envs.doctor import machine, packages

    return [
        packages.check_python,
        packages.check_versions,
        packages.check_torch,
        packages.check_names,
        machine.check_isolation,
        machine.check_disk,
        machine.check_memory,
        machine.check_graphics,
        machine.check_data,
    ]


def _show(findings: list[Finding]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("what", "verdict", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        found = Text(finding.found)
        if finding.mend:
            found.append(f"\n{finding.mend}", style="italic")
        table.add_row(Text(finding.name), Text(finding.verdict.value, style=COLOURS[finding.verdict]), found)
    console = Console()
    console.print(table)
    counts = [sum(finding.verdict is verdict for finding in findings) for verdict in (Verdict.PROBLEM, Verdict.NOTE)]
    console.print(f"{counts[0]} problems, {counts[1]} notes", highlight=False)
