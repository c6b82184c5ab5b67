"""Progress of an evaluation while it runs: its episodes, and the responses of those under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from spear_agents.engines.base import Generation
from spear_agents.trajectory import Trajectory
from spear_sandbox.terminal import Console


class _Responses(ProgressColumn):
    """Responses, tokens and cost so far, put into words only when the screen is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self._responses = self._tokens = 0
        self._cost: float | None = None

    def count(self, answer: Generation) -> None:
        self._responses += 1
        served = answer.served
        if served is not None:
            self._tokens += (served.prompt_tokens or 0) + (served.completion_tokens or 0)
            if served.cost is not None:
                self._cost = (self._cost or 0.0) + served.cost

    def render(self, task: Task) -> Text:
        if not self._responses:
            return Text()
        tokens = f", {self._tokens:,} tokens" if self._tokens else ""
        cost = "" if self._cost is None else f", cost {self._cost:.4f}"
        return Text(f"{self._responses:,} turns{tokens}{cost}")


class EpisodeBar:
    """A progress bar with the success so far, and with the turns, tokens and cost of this run.

    Turns show that long episodes advance, minutes before the first of them ends.
    """

    def __init__(self, title: str, progress: Progress, responses: _Responses) -> None:
        self._title = title
        self._progress = progress
        self._bar = progress.add_task(f"{title}: loading", total=None, won="")
        self._wins = self._played = self._faults = 0
        self.on_response = responses.count
        """Counts a response that has been written."""

    def observe(self, done: int, total: int, trajectory: Trajectory | None) -> None:
        """Show an episode that has ended: an :class:`~spear_agents.evaluation.Observer`."""
        if trajectory is not None:
            self._faults += trajectory.fault is not None
            self._played += trajectory.fault is None
            self._wins += trajectory.won
        share = f"won {self._wins / self._played:.1%}" if self._played else ""
        won = share + (f", {self._faults} faults" if self._faults else "")
        self._progress.update(self._bar, description=self._title, completed=done, total=total, won=won)


@contextmanager
def watch_episodes(title: str, console: Console) -> Iterator[EpisodeBar]:
    """Show a progress bar on a terminal, or in a notebook with ipywidgets, and nothing elsewhere."""
    responses = _Responses()
    shown = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_interactive
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[won]}"),
        responses,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not shown,
    ) as progress:
        yield EpisodeBar(title, progress, responses)
