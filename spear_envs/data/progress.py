"""Progress bars of transfers, checks, unpacking and builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

__all__ = ["Show", "show_bytes", "show_phases"]

Show = Callable[[str, int, "int | None"], None]
"""Hears what is being done, how much of it is done, and of how much (None: not known)."""


@contextmanager
def show_bytes(console: Console | None) -> Iterator[Show]:
    """A bar of bytes on a terminal, elsewhere a line for each thing that is begun; nothing without a console."""
    if console is None:
        yield lambda what, done, total: None
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _show(console, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), transient=True) as show:
        yield show


def show_phases(console: Console) -> AbstractContextManager[Show]:
    """A bar for each phase, of which the next begins when one ends; elsewhere a line when it begins."""
    from rich.progress import TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

    return _show(console, TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn(), in_turn=True)


@contextmanager
def _show(console: Console, *figures: ProgressColumn, transient: bool = False, in_turn: bool = False) -> Iterator[Show]:
    if not console.is_terminal:
        begun: set[str] = set()

        def say(what: str, done: int, total: int | None) -> None:
            if what not in begun:
                begun.add(what)
                console.print(what, soft_wrap=True, markup=False, highlight=False)

        yield say
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *figures)
    with Progress(*columns, console=console, transient=transient) as progress:
        tasks = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for task in progress.tasks if in_turn else ():  # what came before is done
                    progress.update(task.id, total=task.completed or 1, completed=task.completed or 1)
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield draw
