"""Progress bars of transfers, checks and unpacking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Show", "show_bytes"]

Show = Callable[[str, int, "int | None"], None]
"""Hears what is being done, how many bytes are done, and of how many (None: not known)."""


@contextmanager
def show_bytes(console: Console | None) -> Iterator[Show]:
    """A bar of bytes on a terminal, elsewhere a line for each thing that is begun; nothing without a console."""
    if console is None:
        yield lambda what, done, total: None
        return
    if not console.is_terminal:
        begun: set[str] = set()

        def say(what: str, done: int, total: int | None) -> None:
            if what not in begun:
                begun.add(what)
                console.print(what, soft_wrap=True, markup=False, highlight=False)

        yield say
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield draw
