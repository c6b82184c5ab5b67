"""Progress of long work in rows: a bar on a terminal, elsewhere a line now and then; always with rate and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "format_seconds", "show_rows"]

Progress = Callable[[str, int, int], None]
"""Hears what is being done, and how many rows of how many are done."""

LINE_SECONDS = 10.0


@dataclass
class _Stage:
    """Rows of one kind of work, counted from where this run began: an earlier one may have done some."""

    began: float
    first: int
    said: float = float("-inf")

    def describe(self, done: int, total: int, now: float) -> str:
        """``1,000 of 13,481 (35/s, 6 min left)``."""
        text = f"{done:,} of {total:,}"
        rate = (done - self.first) / (now - self.began) if now > self.began else 0.0
        if rate <= 0:
            return text
        left = f", {format_seconds((total - done) / rate)} left" if done < total else ""
        return f"{text} ({rate:,.0f}/s{left})" if rate >= 10 else f"{text} ({rate:.1f}/s{left})"


@contextmanager
def show_rows(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """A function to call as work goes on."""
    stages: dict[str, _Stage] = {}
    if not console.is_terminal:

        def say(what: str, done: int, total: int) -> None:
            now = clock()
            stage = stages.setdefault(what, _Stage(now, done))
            if done >= total or now - stage.said >= LINE_SECONDS:
                stage.said = now
                console.print(
                    f"{what}: {stage.describe(done, total, now)}", soft_wrap=True, markup=False, highlight=False
                )

        yield say
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}")
    with Progress(*columns, console=console) as bars:
        tasks = {}

        def draw(what: str, done: int, total: int) -> None:
            now = clock()
            stage = stages.setdefault(what, _Stage(now, done))
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, text="")
            bars.update(tasks[what], completed=done, total=total, text=stage.describe(done, total, now))

        yield draw


def format_seconds(seconds: float) -> str:
    """A time for people: seconds, minutes, hours or days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 or unit == "s" else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"
