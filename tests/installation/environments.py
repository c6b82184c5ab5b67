"""Interpreters of this machine, wheels of the checkout, and fresh environments that have them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
FOLDERS = {"spear-sandbox": "sandbox", "spear-envs": ".", "spear-agents": "agents", "spear-training": "training"}
SOURCES = ("sandbox", "spear_envs", "agents", "training")
ROOT_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "VERSION", "LICENSE")


@lru_cache
def find_python(version: str) -> str | None:
    """An interpreter of this version; None if there is none. A shim of pyenv may be on the path and not run."""
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    places = [shutil.which(f"python{version}"), *map(str, managed.glob(f"{version}.*/bin/python{version}"))]
    for place in filter(None, places):
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return place
    return None


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder without the checkout to run programs in."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self, *arguments: str, constraints: Path | None = None) -> None:
        """Have pip install something; the test fails with what it says if it cannot."""
        extra = ["-c", str(constraints)] if constraints else []
        done = self.run("-m", "pip", "install", "-q", "--disable-pip-version-check", *extra, *arguments, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def run(self, *arguments: str, check: bool = True, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """Run its Python."""
        return self.call(self.python, *arguments, check=check, seconds=seconds)

    def call(self, *command: str, check: bool = True, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a program from its scripts, or from this machine, in a folder of its own."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        scripts = str(self.folder / "bin")
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        variables |= {"PATH": os.pathsep.join([scripts, os.environ["PATH"]]), "COLUMNS": "200"}
        done = subprocess.run(
            command, cwd=work, env=variables, capture_output=True, text=True, timeout=seconds, check=False
        )
        if check:
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done


def make_environment(folder: Path, version: str) -> Environment:
    """An empty environment with this Python."""
    python = find_python(version)
    assert python is not None, "look with find_python first"
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    return Environment(folder)


def build_wheels(environment: Environment, names: Sequence[str], folder: Path) -> dict[str, str]:
    """Wheels of our distributions, built as pip builds them, from a copy of the checkout's sources."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "*.so")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored, symlinks=True)
    for name in ROOT_FILES:
        shutil.copy(ROOT / name, source)
    paths = [str(source / FOLDERS[name]) for name in names]
    environment.run("-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder / "dist"), *paths)
    return {name: str(next((folder / "dist").glob(f"{name.replace('-', '_')}-*.whl"))) for name in names}


def say_what_is_missing(version: str) -> str:
    """The reason to skip a test where an interpreter is not there."""
    return f"this machine has no Python {version} with venv (tests run on {sys.version_info[0]}.{sys.version_info[1]})"
