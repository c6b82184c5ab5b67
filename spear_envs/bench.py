"""``spear bench``: the benchmarks, which are part of the checkout and not of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from spear_envs.core.errors import SpearError

ROOT = Path(__file__).resolve().parents[1]
MODULE = "benchmarks.runner.cli"


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(context: click.Context, words: tuple[str, ...]) -> Any:
    """Measure speed and memory next to other packages and limits: list, run, show, compare."""
    if not (ROOT / MODULE.replace(".", "/")).with_suffix(".py").is_file():
        raise SpearError("The installed package lacks the benchmarks: clone the repository and run 'make bench' there.")
    sys.path.insert(0, str(ROOT))
    command: click.Command = importlib.import_module(MODULE).bench
    return command.main(list(words), prog_name=context.command_path, standalone_mode=False)
