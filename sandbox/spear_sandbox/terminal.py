"""The console through which all commands print with Rich, and the progress of long work on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import rich.console
import rich.progress
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from spear_sandbox.console import format_seconds
from spear_sandbox.errors import show_text

LINE_SECONDS = 10.0
"""Seconds between two lines of progress, short enough to see in a log that the work is alive."""
_NOT_IN_LINES = (BarColumn, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn)


class Console(rich.console.Console):  # noqa: TID251
    """Rich's console, safe for text of others: no markup or emoji unless a call asks for it, and no raw controls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text safe before it is measured."""
        return super().render_str(show_text(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make safe what was not a string; Rich's own controls stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(show_text(segment.text), segment.style)


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
            self._say(description)
        return task_id

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """See Rich; also note what earlier work had done, so that it does not count as speed.

        A task that counts from the start again has its time from there, too.
        """
        if 0 <= changes.get("completed", -1) < self._tasks[task_id].completed:
            self.reset(task_id)
            self._first.pop(task_id, None)
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
                    self._say(self._describe(task))
            elif of_unfinished:
                self._written.add(task.id)
                self._say(self._describe(task))

    def _describe(self, task: Task) -> str:
        columns = [column for column in self.columns[1:] if not isinstance(column, _NOT_IN_LINES)]
        texts = [str(column(task)) for column in columns if isinstance(column, ProgressColumn)]
        amounts = " ".join(" ".join(text.split()) for text in texts if text and "?" not in text)
        elapsed = (task.finished_time if task.finished else task.elapsed) or 0.0
        parts = [amounts] if amounts else []
        parts.append(f"{format_seconds(elapsed)}{'' if task.finished else ' so far'}")
        begun, earlier = self._first.get(task.id, (0.0, 0.0))
        if task.total is not None and not task.finished and task.completed > earlier:
            left = (task.total - task.completed) * (elapsed - begun) / (task.completed - earlier)
            parts.append(f"about {format_seconds(left)} left")
        return f"{task.description}: {', '.join(parts)}"

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False)


@contextmanager
def hold_console(console: Console) -> Iterator[Console]:
    """Yield a console that keeps writing where ``console`` writes now, while standard output and error go elsewhere.

    vLLM's start sends both to its log for a minute or two.
    """
    stream = console.file
    try:
        number = None if console.is_jupyter else os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        number = None  # not a file of the system: nothing can redirect it
    if number is None:
        yield console
        return
    stream.flush()
    with open(
        number, "w", buffering=1, encoding=getattr(stream, "encoding", None), errors=getattr(stream, "errors", None)
    ) as held:
        yield Console(file=held)


class RowsColumn(ProgressColumn):
    """Rows done, and how many in a second: ``1,000 of 13,481 (35/s)``."""

    def render(self, task: Task) -> Text:
        """Describe the rows of a task."""
        done, speed = int(task.completed), task.finished_speed or task.speed
        text = f"{done:,}" if task.total is None else f"{done:,} of {int(task.total):,}"
        if not speed:
            return Text(text)
        return Text(f"{text} ({speed:,.0f}/s)" if speed >= 10 else f"{text} ({speed:.1f}/s)")
