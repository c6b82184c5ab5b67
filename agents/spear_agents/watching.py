"""Progress bar of episodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spear_agents.evaluation import Observer
from spear_agents.trajectory import Trajectory


@contextmanager
def watch_episodes(title: str, console: Console) -> Iterator[Observer]:
    """Show a progress bar with the success so far, on a terminal or in a notebook."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[won]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (console.is_terminal or console.is_jupyter),
    ) as progress:
        bar = progress.add_task(f"{title}: loading", total=None, won="")
        wins = played = faults = 0

        def observe(done: int, total: int, trajectory: Trajectory | None) -> None:
            nonlocal wins, played, faults
            if trajectory is not None:
                faults += trajectory.fault is not None
                played += trajectory.fault is None
                wins += trajectory.won
            share = f"won {wins / played:.1%}" if played else ""
            won = share + (f", {faults} faults" if faults else "")
            progress.update(bar, description=title, completed=done, total=total, won=won)

        yield observe
