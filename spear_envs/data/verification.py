"""``spear data verify``: faults of data sets, reported to people and scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from spear_envs.core.errors import SpearError
from spear_envs.data.files import RemoteFile, verify
from spear_envs.data.joining import verify_joined
from spear_envs.data.locking import pin
from spear_envs.data.progress import count_bytes, say, show_bytes
from spear_sandbox.console import echo

if TYPE_CHECKING:
    from spear_sandbox.terminal import Console


class State(Enum):
    """Result of a verification."""

    WHOLE = "whole"
    """Everything that is here is as it should be."""
    DAMAGED = "damaged"
    """Something is damaged, incomplete or not what was published."""
    ABSENT = "absent"
    """Nothing is here."""


class AbsentDataError(SpearError):
    """Nothing of a data set is here."""


class _DamageError(click.ClickException):
    exit_code = 1


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

JSON_HELP = "JSON on stdout; everything else goes to stderr."
json_option = click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
"""``--json`` of every ``spear data verify``, as ``as_json: bool``."""


def inspect_file(path: Path, console: Console, file: RemoteFile | None = None) -> Finding:
    """Compare a fetched copy of ``file``, if known, with its locked or recorded checksum, or those of its parts."""
    try:
        with show_bytes(console) as show:
            count = count_bytes(show, f"checking {path.name}", path.stat().st_size)
            if path.with_name(f"{path.name}.parts.json").exists():
                verify_joined(path, count)
            else:
                verify(pin(file or RemoteFile(path.name), path.parent), path.parent, count)
    except SpearError as error:
        return Finding(str(path), str(error))
    return Finding(str(path))


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
    names: dict[State, list[str]] = {state: [] for state in State}
    absence = "nothing is here: 'spear data get' fetches it."
    for name, inspect in inspections.items():
        state, findings, reason = _inspect(inspect, console)
        names[state].append(name)
        results.append({"dataset": name, "state": state.value, "findings": [asdict(finding) for finding in findings]})
        for finding in findings:
            say(console, f"{name}: {finding.fault or f'{finding.subject} is as it should be'}")
        if state is State.ABSENT and len(inspections) > 1:
            say(console, f"{name}: nothing is here")
        elif state is State.ABSENT:
            absence = reason
    if as_json:
        echo(json.dumps(results, indent=1))
    if damaged := names[State.DAMAGED]:
        raise _DamageError(
            f"{' and '.join(damaged)}: not all of it is as it should be. Delete what is damaged; 'spear data get"
            f" {damaged[0]}' fetches and mends."
        )
    if not names[State.WHOLE]:
        raise _NothingError(absence)


def _inspect(inspect: Inspect, console: Console) -> tuple[State, list[Finding], str]:
    findings: list[Finding] = []
    try:
        findings.extend(inspect(console))
    except AbsentDataError as error:
        return State.ABSENT, [], str(error)
    except SpearError as error:  # stops the inspection
        findings.append(Finding("", str(error)))
    return State.DAMAGED if any(finding.fault for finding in findings) else State.WHOLE, findings, ""
