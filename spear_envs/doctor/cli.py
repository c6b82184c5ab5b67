"""``spear doctor``: the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import click

from spear_envs.core.errors import suggest_name
from spear_envs.doctor.findings import Check, Finding, Verdict, examine, name_check
from spear_sandbox.console import echo

CHECK_GROUP = "spear.checks"
"""Checks of other distributions: functions without arguments that yield findings."""
COLOURS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@click.command()
@click.argument("names", nargs=-1, metavar="[CHECK]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(names: tuple[str, ...], as_json: bool) -> None:
    """Check this installation and machine, and say what to fix.

    With names, only these checks are run: python, versions, extras, torch, import, isolation, disk, memory,
    graphics, data, attention. Exit code 1 if there is a problem (notes are not problems). Nothing is changed.

    \b
      spear doctor
      spear doctor isolation memory --json
    """
    checks = list_checks()
    for name in names:
        if name not in checks:
            raise click.UsageError(f"There is no check {name!r}.{suggest_name(name, list(checks))}")
    findings = [finding for name in names or checks for finding in examine(checks[name])]
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    if as_json:
        echo(json.dumps({"ok": not problems, "findings": [finding.describe() for finding in findings]}))
    else:
        _show(findings)
    if problems:
        sys.exit(1)


def list_checks() -> dict[str, Check]:
    """List all checks by name in the order of the report: ours, then those of the entry points ``spear.checks``."""
    from spear_envs.doctor import machine, packages

    ours: tuple[Check, ...] = (
        packages.check_python,
        packages.check_versions,
        packages.check_extras,
        packages.check_torch,
        packages.check_import,
        machine.check_isolation,
        machine.check_disk,
        machine.check_memory,
        machine.check_graphics,
        machine.check_data,
    )
    checks = {name_check(check): check for check in ours}
    return checks | {point.name: _defer(point) for point in sorted(entry_points(group=CHECK_GROUP))}


def _defer(point: EntryPoint) -> Check:
    """Import a check when it runs, so that a failing import is a finding."""

    def check() -> Iterable[Finding]:
        found: Iterable[Finding] = point.load()()
        return found

    check.__name__ = f"check_{point.name}"
    return check


def _show(findings: list[Finding]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from spear_sandbox.terminal import Console

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
    counts = {each: sum(finding.verdict is each for finding in findings) for each in (Verdict.PROBLEM, Verdict.NOTE)}
    told = (f"{count} {each.value}{'' if count == 1 else 's'}" for each, count in counts.items())
    console.print(", ".join(told), highlight=False)
