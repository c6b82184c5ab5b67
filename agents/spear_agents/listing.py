"""Lists of names with a text each, as the commands print them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spear_sandbox.terminal import Console

READABLE = 50
"""Columns that a text needs next to a table; with fewer, it goes below its row."""


def print_rows(console: Console, headings: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> None:
    """A table of short cells, each row with a text next to it if there is room, else below it."""
    widths = [max(map(len, column)) for column in zip(headings, *(cells for cells, _ in rows), strict=True)]
    if console.width >= sum(widths) + 2 * len(widths) + READABLE:
        table = Table(*headings, "what it is", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for cells, text in rows:
            table.add_row(*map(Text, (*cells, text)))
        console.print(table)
        return
    console.print(_join_cells(headings, widths), style="bold")
    for cells, text in rows:
        console.print(_join_cells(cells, widths))
        if text:
            console.print(Padding(Text(text, style="dim"), (0, 0, 0, 4)))


def _join_cells(cells: Sequence[str], widths: Sequence[int]) -> Text:
    return Text("  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
