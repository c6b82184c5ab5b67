"""``spear init``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from spear_envs.scaffold.writing import EnvPackage, check_name, write_package
from spear_sandbox.console import echo


@click.group()
def init() -> None:
    """Write files to start from."""


@init.command(name="env")
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="New or empty folder; by default NAME with dashes.")
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
