"""Tables on a terminal of any width, with every figure whole."""

from __future__ import annotations

from rich.measure import Measurement
from rich.table import Table

from spear_sandbox.terminal import Console

_ENDLESS = 10_000
_SHORTEST = 8
"""Characters of the first column that stay on one line."""


def show_table(console: Console, table: Table) -> None:
    """Print a table; one that is too wide is folded into several with the same first column.

    Only texts of the first column are broken.
    """

    def measure(*places: int) -> int:
        part = _take(table, [*places])
        return Measurement.get(console, console.options.update(max_width=_ENDLESS), part).maximum

    count = len(table.columns)
    widest = max((measure(place) for place in range(1, count)), default=0)
    first = max(_SHORTEST, min(measure(0), console.width - widest))
    groups: list[list[int]] = [[]]
    for place in range(1, count):
        if groups[-1] and first + measure(*groups[-1], place) > console.width:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        part = _take(table, [0, *group], first if len(groups) > 1 or first < measure(0) else None)
        part.title = table.title if group is groups[0] else None
        part.caption = table.caption if group is groups[-1] else None
        part.min_width = table.min_width if len(groups) == 1 else None
        console.print(part)


def _take(table: Table, places: list[int], first: int | None = None) -> Table:
    """The columns of a table at ``places``; the first has at most ``first`` characters."""
    part = Table(
        title_justify=table.title_justify,
        title_style=table.title_style,
        box=table.box,
        padding=table.padding,
        pad_edge=table.pad_edge,
        collapse_padding=table.collapse_padding,
        show_header=table.show_header,
    )
    columns = [table.columns[place] for place in places]
    for number, column in enumerate(columns):
        breaks = number == 0 and first is not None
        part.add_column(
            column.header,
            justify=column.justify,
            style=column.style,
            max_width=first if breaks else None,
            no_wrap=not breaks,
            overflow="fold",
        )
    cells = [list(column.cells) for column in columns]
    for number, row in enumerate(table.rows):
        part.add_row(*(column[number] for column in cells), style=row.style, end_section=row.end_section)
    return part
