"""What commands print: lines, tables of any width, and progress as bars on a terminal, else as lines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID
    from rich.table import Table

    from spear_sandbox.terminal import Console


Show = Callable[[str, int, "int | None"], None]
"""Called with a description, the amount done, and the total (None: unknown)."""

_ENDLESS = 10_000
_MOST_FOLDS = 3
_LONGEST = 16
"""Characters of a word in a table's first column that stay on one line; longer ones, such as paths, are broken."""


def say(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, without markup and colours."""
    console.print(line, soft_wrap=True, highlight=False)


def count_bytes(show: Show, what: str, total: int) -> Callable[[int], None]:
    """Make a counter of bytes that shows its progress."""
    done = 0

    def count(further: int) -> None:
        nonlocal done
        done += further
        show(what, done, total)

    return count


@contextmanager
def show_bytes(console: Console | None) -> Iterator[Show]:
    """Show bytes, their speed and the time left; nothing without a console."""
    if console is None:
        yield lambda what, done, total: None
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _show(console, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), transient=True) as show:
        yield show


def show_phases(console: Console) -> AbstractContextManager[Show]:
    """Show the share done of each of successive phases."""
    from rich.progress import TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

    return _show(console, TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), in_turn=True)


def show_rows(console: Console) -> AbstractContextManager[Show]:
    """Show the amount, the rate and the time left of each kind of work."""
    from rich.progress import TimeElapsedColumn, TimeRemainingColumn

    from spear_sandbox.terminal import RowsColumn

    return _show(console, RowsColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def _show(console: Console, *figures: ProgressColumn, transient: bool = False, in_turn: bool = False) -> Iterator[Show]:
    from rich.progress import BarColumn, TextColumn

    from spear_sandbox.terminal import Progress

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *figures)
    with Progress(*columns, console=console, transient=transient, announces=True) as progress:
        tasks: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for task in progress.tasks if in_turn else ():  # what came before is done
                    progress.update(task.id, total=task.completed or 1, completed=task.completed or 1)
                tasks[what] = progress.add_task(what, total=total, completed=done)
            progress.update(tasks[what], completed=done, total=total)

        yield draw


def show_table(console: Console, table: Table) -> None:
    """Print a table in a terminal of any width.

    One that is too wide is folded into up to three with the same first column, whose texts are broken between words.
    Where that is not enough, each row is a list.
    """
    from rich.measure import Measurement

    def take(places: list[int], first: int | None = None) -> Table:
        part = copy.copy(table)
        part.columns = [copy.copy(table.columns[place]) for place in places]
        for column in part.columns:
            column.no_wrap, column.overflow = True, "fold"
        if first is not None:
            part.columns[0].no_wrap, part.columns[0].max_width = False, first
        return part

    def measure(*places: int, breaking: bool = False) -> int:
        part = take([*places])
        part.columns[0].no_wrap = not breaking
        part.title = part.caption = part.min_width = None
        found = Measurement.get(console, console.options.update(max_width=_ENDLESS), part)
        return found.minimum if breaking else found.maximum

    count = len(table.columns)
    widest = max((measure(place) for place in range(1, count)), default=0)
    is_narrow = min(_LONGEST, measure(0, breaking=True)) + widest > console.width
    first = min(measure(0), console.width - widest)
    groups: list[list[int]] = [[]]
    for place in range(1, count):
        if groups[-1] and first + measure(*groups[-1], place) > console.width:
            groups.append([])
        groups[-1].append(place)
    if count > 1 and (is_narrow or len(groups) > _MOST_FOLDS):
        _show_list(console, table)
        return
    for group in groups:
        part = take([0, *group], first if len(groups) > 1 or first < measure(0) else None)
        if group is not groups[0]:
            part.title = None
        if group is not groups[-1]:
            part.caption = None
        if len(groups) > 1:
            part.min_width = None
        console.print(part)


def _show_list(console: Console, table: Table) -> None:
    """Print each row of a table as its first cell, with the others below it."""
    from rich.padding import Padding

    if table.title:
        console.print(table.title, style="italic")
    names, *others = ([*column.cells] for column in table.columns)
    for place, name in enumerate(names):
        console.print(name, style="bold")
        for column, cells in zip(table.columns[1:], others, strict=True):
            if cells[place] != "":
                console.print(Padding(f"{column.header} {cells[place]}".strip(), (0, 0, 0, 1), expand=False))
    if table.caption:
        console.print(table.caption, style="dim")
