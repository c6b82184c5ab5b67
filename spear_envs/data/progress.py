"""What commands print: lines, tables of any width, and progress as bars on a terminal, else as lines."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn
    from rich.table import Table

    from spear_sandbox.terminal import Console


Show = Callable[[str, int, "int | None"], None]
"""Called with a description, the amount done, and the total (None: unknown)."""

LINE_SECONDS = 10.0
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
    """Show a bar of bytes on a terminal, else a line for each beginning; nothing without a console."""
    if console is None:
        yield lambda what, done, total: None
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _show(console, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), transient=True) as show:
        yield show


def show_phases(console: Console) -> AbstractContextManager[Show]:
    """Show a bar for each of successive phases, or a line when it begins."""
    from rich.progress import TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

    return _show(console, TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), in_turn=True)


@contextmanager
def show_rows(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Show]:
    """Show a bar for each kind of work, or a line now and then, with amount, rate and time left."""
    from rich.progress import TextColumn

    stages: dict[str, _Stage] = {}
    with _show(console, TextColumn("{task.fields[note]}", markup=False)) as draw:

        def report(what: str, done: int, total: int | None) -> None:
            now = clock()
            stage = stages.setdefault(what, _Stage(now, done))
            if console.is_interactive:
                draw(what, done, total, stage.describe(done, total, now))
            elif done == total or now - stage.said >= LINE_SECONDS:
                stage.said = now
                say(console, f"{what}: {stage.describe(done, total, now)}")

        yield report


@contextmanager
def _show(
    console: Console, *figures: ProgressColumn, transient: bool = False, in_turn: bool = False
) -> Iterator[Callable[..., None]]:
    if not console.is_interactive:
        begun: set[str] = set()

        def report(what: str, done: int, total: int | None) -> None:
            if what not in begun:
                begun.add(what)
                say(console, what)

        yield report
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *figures)
    with Progress(*columns, console=console, transient=transient) as progress:
        tasks = {}

        def draw(what: str, done: int, total: int | None, note: str = "") -> None:
            if what not in tasks:
                for task in progress.tasks if in_turn else ():  # what came before is done
                    progress.update(task.id, total=task.completed or 1, completed=task.completed or 1)
                tasks[what] = progress.add_task(what, total=total, completed=done, note=note)
            progress.update(tasks[what], completed=done, total=total, note=note)

        yield draw


@dataclass
class _Stage:
    """Rows of one kind of work in this run; an earlier one may have done some."""

    began: float
    first: int
    said: float = float("-inf")

    def describe(self, done: int, total: int | None, now: float) -> str:
        """Return a text such as ``1,000 of 13,481 (35/s, 6 min left)``."""
        text = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        rate = (done - self.first) / (now - self.began) if now > self.began else 0.0
        if rate <= 0:
            return text
        left = f", {format_seconds((total - done) / rate)} left" if total is not None and done < total else ""
        return f"{text} ({rate:,.0f}/s{left})" if rate >= 10 else f"{text} ({rate:.1f}/s{left})"


def format_seconds(seconds: float) -> str:
    """Format a time for people: seconds, minutes, hours or days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 or unit == "s" else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


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
