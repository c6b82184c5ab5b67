"""Progress of transfers, checks, unpacking and builds: bars on a terminal, else lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task

    from spear_sandbox.terminal import Console


Show = Callable[[str, int, "int | None"], None]
"""Called with a description, the amount done, and the total (None: unknown)."""

LINE_SECONDS = 10.0


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
    stages: dict[str, _Stage] = {}
    if console.is_interactive:
        from rich.progress import ProgressColumn
        from rich.text import Text

        class Amount(ProgressColumn):
            def render(self, task: Task) -> Text:
                stage = stages.setdefault(task.description, _Stage(0.0, int(task.completed)))
                total = None if task.total is None else int(task.total)
                seconds = task.finished_time or task.elapsed or 0.0
                return Text(stage.describe(int(task.completed), total, seconds))

        with _show(console, Amount()) as show:
            yield show
        return

    def tell(what: str, done: int, total: int | None) -> None:
        now = clock()
        stage = stages.setdefault(what, _Stage(now, done))
        if done == total or now - stage.said >= LINE_SECONDS:
            stage.said = now
            say(console, f"{what}: {stage.describe(done, total, now)}")

    yield tell


@contextmanager
def _show(console: Console, *figures: ProgressColumn, transient: bool = False, in_turn: bool = False) -> Iterator[Show]:
    if not console.is_interactive:
        begun: set[str] = set()

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in begun:
                begun.add(what)
                say(console, what)

        yield tell
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *figures)
    with Progress(*columns, console=console, transient=transient) as progress:
        tasks = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for task in progress.tasks if in_turn else ():  # what came before is done
                    progress.update(task.id, total=task.completed or 1, completed=task.completed or 1)
                tasks[what] = progress.add_task(what, total=total, completed=done)
            progress.update(tasks[what], completed=done, total=total)

        yield draw


@dataclass
class _Stage:
    """Rows of one kind of work in this run; an earlier one may have done some."""

    began: float
    first: int
    said: float = float("-inf")

    def describe(self, done: int, total: int | None, now: float) -> str:
        """``1,000 of 13,481 (35/s, 6 min left)``."""
        text = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        rate = (done - self.first) / (now - self.began) if now > self.began else 0.0
        if rate <= 0:
            return text
        left = f", {format_seconds((total - done) / rate)} left" if total is not None and done < total else ""
        return f"{text} ({rate:,.0f}/s{left})" if rate >= 10 else f"{text} ({rate:.1f}/s{left})"


def format_seconds(seconds: float) -> str:
    """A time for people: seconds, minutes, hours or days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 or unit == "s" else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"
