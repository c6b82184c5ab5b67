"""``spear algorithms``."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table


@click.command("algorithms")
def algorithms() -> None:
    """List the algorithms that `spear train algorithm=NAME` runs.

    Each is a file of training/spear_training/config/algorithm with what it changes; docs/algorithms.md has the
    equations.
    """
    from spear_training.catalogue import list_algorithms

    table = Table("algorithm=", "in the paper", "what it is", box=None, pad_edge=False)
    for algorithm in list_algorithms():
        table.add_row(algorithm.name, algorithm.title, algorithm.meaning)
    Console().print(table)
