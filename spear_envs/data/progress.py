"""What commands print: lines, tables of any width, and progress as bars on a terminal, else as lines."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import rich.progress
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

    from spear_sandbox.terminal import Console


Show = Callable[[str, int, "int | None"], None]
"""Called with a description, the amount done, and the total (None: unknown)."""

LINE_SECONDS = 10.0
"""Seconds between two lines of progress: a reader of a log sees that the work is alive."""
_ENDLESS = 10_000
_SHORTEST = 8
"""Characters of a table's first column that stay on one line."""


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


class Progress(rich.progress.Progress):
    """Rich's bars on a terminal; elsewhere a line every ten seconds: what, how much, and how long so far and still.

    A thread writes the lines, so that they also come during a long step. A task of less than ten seconds has none,
    except its announcement.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        console: Console,
        announces: bool = False,
        every_s: float = LINE_SECONDS,
        **options: Any,
    ) -> None:
        """Make the display.

        Args:
            columns: of the bars; the first is the description. Lines have those that are neither bars nor times.
            console: where bars and lines go.
            announces: write a line when a task begins.
            every_s: seconds between two lines.
            options: those of Rich's class.
        """
        super().__init__(*columns, console=console, **options)
        self._shows_bars = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_interactive
        self._announces = announces
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._written: set[TaskID] = set()
        self._first: dict[TaskID, tuple[float, float]] = {}

    def start(self) -> None:
        """Begin to draw, or to write lines."""
        if self._shows_bars:
            super().start()
        elif self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._write_regularly, name="progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop drawing, or write the last line of each task that is complete and had lines."""
        if self._shows_bars:
            super().stop()
        elif self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            self._write(of_unfinished=False)

    def refresh(self) -> None:
        """Draw now; lines keep their own times."""
        if self._shows_bars:
            super().refresh()

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        """See Rich; also announce the task if it has no bar."""
        task_id = super().add_task(description, *args, **options)
        if self._announces and not self._shows_bars:
            say(self.console, description)
        return task_id

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """See Rich; also note what was there before this work, which is no part of its speed."""
        super().update(task_id, **changes)
        if changes.get("completed") and task_id not in self._first:
            task = self._tasks[task_id]
            self._first[task_id] = (task.elapsed or 0.0, task.completed)

    def _write_regularly(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._write()

    def _write(self, *, of_unfinished: bool = True) -> None:
        for task in self.tasks:
            if task.finished:
                if task.id in self._written:
                    self._written.discard(task.id)
                    say(self.console, self._describe(task))
            elif of_unfinished:
                self._written.add(task.id)
                say(self.console, self._describe(task))

    def _describe(self, task: Task) -> str:
        columns = [column for column in self.columns[1:] if not isinstance(column, _NOT_IN_LINES)]
        texts = [str(column(task)) for column in columns if isinstance(column, ProgressColumn)]
        amounts = " ".join(text for text in texts if text and "?" not in text)
        elapsed = (task.finished_time if task.finished else task.elapsed) or 0.0
        parts = [amounts] if amounts else []
        parts.append(f"{format_seconds(elapsed)}{'' if task.finished else ' so far'}")
        begun, earlier = self._first.get(task.id, (0.0, 0.0))
        if task.total is not None and not task.finished and task.completed > earlier:
            left = (task.total - task.completed) * (elapsed - begun) / (task.completed - earlier)
            parts.append(f"about {format_seconds(left)} left")
        return f"{task.description}: {', '.join(parts)}"


_NOT_IN_LINES = (BarColumn, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn)


@contextmanager
def show_bytes(console: Console | None) -> Iterator[Show]:
    """Show bytes, their speed and the time left; nothing without a console."""
    if console is None:
        yield lambda what, done, total: None
        return
    with _show(console, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), transient=True) as show:
        yield show


def show_phases(console: Console) -> AbstractContextManager[Show]:
    """Show the share done of each of successive phases."""
    return _show(console, TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), in_turn=True)


def show_rows(console: Console) -> AbstractContextManager[Show]:
    """Show the amount, the rate and the time left of each kind of work."""
    return _show(console, _RowsColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def _show(
    console: Console, *figures: ProgressColumn, transient: bool = False, in_turn: bool = False
) -> Iterator[Show]:
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


class _RowsColumn(ProgressColumn):
    """Rows done, and how many in a second: ``1,000 of 13,481 (35/s)``."""

    def render(self, task: Task) -> Text:
        """Describe the rows of a task."""
        done, speed = int(task.completed), task.finished_speed or task.speed
        text = f"{done:,}" if task.total is None else f"{done:,} of {int(task.total):,}"
        if not speed:
            return Text(text)
        return Text(f"{text} ({speed:,.0f}/s)" if speed >= 10 else f"{text} ({speed:.1f}/s)")


def format_seconds(seconds: float) -> str:
    """Format a time for people: seconds, minutes, hours or days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 or unit == "s" else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def show_table(console: Console, table: Table) -> None:
    """Print a table; one that is too wide is folded into several with the same first column.

    Only texts of the first column are broken.
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

    def measure(*places: int) -> int:
        part = take([*places])
        part.title = part.caption = part.min_width = None
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
        part = take([0, *group], first if len(groups) > 1 or first < measure(0) else None)
        if group is not groups[0]:
            part.title = None
        if group is not groups[-1]:
            part.caption = None
        if len(groups) > 1:
            part.min_width = None
        console.print(part)
