"""``spear init``: write a package from templates, with a valid name, and all files or none."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import click

from spear_envs.core.errors import SpearError
from spear_sandbox.console import FilePath, echo

DISTRIBUTION = "spear-envs"
OURS = ("spear", "spear_envs", "spear_sandbox", "spear_agents", "spear_training")
"""The namespace of our ids, and our packages, whether they are installed or not."""
RESERVED = ("tests", "conftest", "build", "dist", "runs")
"""Names of the package's own tests, and folders that its .gitignore leaves out."""

FILES: Mapping[str, str] = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    ".gitignore": "gitignore.tmpl",
    "$name/__init__.py": "package.py.tmpl",
    "$name/env.py": "env.py.tmpl",
    "tests/test_contract.py": "test_contract.py.tmpl",
}
"""Files of the package and their templates."""


@dataclass(frozen=True)
class EnvPackage:
    """A package with one environment."""

    name: str
    """Name of the Python package, such as ``"key_corridor"``."""

    @property
    def distribution(self) -> str:
        """Return the name for pip and for the folder."""
        return self.name.replace("_", "-")

    @property
    def title(self) -> str:
        """Return the name of the class: ``"KeyCorridor"``."""
        return "".join(part[:1].upper() + part[1:] for part in self.name.split("_"))

    @property
    def env_id(self) -> str:
        """Return the id, such as ``"key_corridor/KeyCorridor-v0"``."""
        return f"{self.name}/{self.title}-v0"


def check_name(name: str) -> str:
    """Return ``name`` if a new package may have it.

    Raises:
        SpearError: it may not; the message says why.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise SpearError(
            f"{name!r} is not a package name: use lower-case letters and digits, a letter first, words joined by"
            " single underscores."
        )
    if taken := _explain_taken(name):
        raise SpearError(f"{name!r} is {taken}: choose another name, such as {name}_env.")
    return name


def _explain_taken(name: str) -> str:
    """Return what a name is already used for, to end a sentence; empty if it is free."""
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return "a word of Python"
    if name in OURS:
        return "a name of SPEAR Envs"
    if name in RESERVED:
        return "a name that the package itself uses"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a folder without __init__.py has none
        return f"a package that is installed ({spec.origin})"
    return ""


def render_package(package: EnvPackage) -> dict[str, str]:
    """Return the texts of a package's files by their paths in its folder."""
    first, second = version(DISTRIBUTION).split(".")[:2]
    values = {
        "name": package.name,
        "distribution": package.distribution,
        "title": package.title,
        "env_id": package.env_id,
        "versions": f">={first}.{second},<{first}.{int(second) + 1}",
    }
    folder = resources.files(__package__) / "template"
    return {
        Template(path).substitute(values): Template((folder / source).read_text(encoding="utf-8")).substitute(values)
        for path, source in FILES.items()
    }


def write_package(package: EnvPackage, folder: Path) -> None:
    """Write a package into a new or empty folder; after an error nothing is left.

    Raises:
        SpearError: the folder is not empty, or its parent does not exist.
        OSError: the package cannot be written.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise SpearError(f"{folder} is not empty: clear it, or name another folder with --out.")
    elif folder.exists() or folder.is_symlink():
        raise SpearError(f"{folder} is a file: name another folder with --out.")
    elif not folder.parent.is_dir():
        raise SpearError(f"the folder {folder.parent} does not exist: make it, or name another with --out.")
    files = render_package(package)
    # On the same disk as its destination, so that a rename is enough.
    with TemporaryDirectory(prefix=".spear-init-", dir=folder if folder.is_dir() else folder.parent) as temporary:
        made = Path(temporary) / "package"
        for path, text in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        if folder.is_dir():
            _move_into(made, folder)
        else:
            made.rename(folder)


def _move_into(made: Path, folder: Path) -> None:
    """Move the content of one folder into another, which may be a current directory and so is not replaced."""
    moved: list[Path] = []
    try:
        for item in sorted(made.iterdir()):
            moved.append(item.rename(folder / item.name))
    except BaseException:
        for item in moved:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        raise


@click.group()
def init() -> None:
    """Write files to start from."""


@init.command(name="env")
@click.argument("name")
@click.option("--out", type=FilePath(), help="New or empty folder; by default NAME with dashes.")
def init_env(name: str, out: Path | None) -> None:
    """Write the package NAME with an environment of your own.

    It is small and complete, has tests, and passes 'spear check' unchanged. With the NAME key_corridor the environment
    is key_corridor/KeyCorridor-v0.

    \b
      spear init env corridor
    """
    package = EnvPackage(check_name(name))
    folder = out if out is not None else Path(package.distribution)
    write_package(package, folder)
    here = folder.resolve() == Path.cwd()
    echo(f"{package.env_id} is in {'this folder' if here else folder}. Next:\n")
    steps = [] if here else [f"cd {shlex.quote(str(folder))}"]
    steps += ["pip install -e '.[dev]'", "pytest", f"spear check {package.env_id} --module {package.name}"]
    for step in steps:
        echo(f"  {step}")
    echo(f"\nThen put your own world into {package.name}/env.py; README.md has the steps.")
