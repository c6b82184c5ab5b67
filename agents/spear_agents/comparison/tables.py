"""The paper's table of each environment: its columns, its number of samples, rows for LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from spear_agents.comparison.statistics import Estimate, Part, average_parts, plain_estimate
from spear_agents.engines.base import Generation
from spear_agents.play.trajectory import Trajectory
from spear_sandbox.terminal import Console, Progress, hold_console

READABLE = 50
"""Columns that a text needs next to a table; with fewer, it goes below its row."""


def print_rows(console: Console, headings: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> None:
    """Return a table of short cells, each row with a text next to it if there is room, else below it."""
    widths = [max(map(len, column)) for column in zip(headings, *(cells for cells, _ in rows), strict=True)]
    if console.width >= sum(widths) + 2 * len(widths) + READABLE:
        table = Table(*headings, "what it is", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for cells, text in rows:
            table.add_row(*map(Text, (*cells, text)))
        console.print(table)
        return
    console.print(_join_cells(headings, widths), style="bold")
    for cells, text in rows:
        console.print(_join_cells(cells, widths))
        if text:
            console.print(Padding(Text(text, style="dim"), (0, 0, 0, 4)))


def _join_cells(cells: Sequence[str], widths: Sequence[int]) -> Text:
    return Text("  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


AIME_SAMPLES = 30
"""Samples of each problem of AIME, which has 30 problems a year."""
_ALFWORLD = ("pick", "look", "clean", "heat", "cool", "pick2")
_BENCHMARKS: Mapping[str, str] = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
"""Benchmarks of questions in the paper's order; others follow."""
_ESCAPES = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\n": " "}
)


PART_HEADINGS = ("tasks", "episodes", "won %", "CI95", "score", "turns", "form %", "valid %", "faults")
"""Columns of :func:`describe_part`: ``score`` is 100 times the benchmark's own, ``form %`` the share of well-formed
turns, ``valid %`` that of turns whose action had an effect."""


def describe_part(part: Part) -> list[str]:
    """Format the figures of a part for :data:`PART_HEADINGS`."""
    success = part.success
    if success is None:
        return ["0", "0", *["–"] * 6, str(part.faults)]
    interval = f"{100 * success.low:.1f}–{100 * success.high:.1f}" if math.isfinite(success.low) else "–"
    return [
        str(success.tasks),
        str(part.episodes),
        f"{100 * success.mean:.1f}",
        interval,
        f"{100 * part.score:.1f}",
        f"{part.turns:.1f}",
        f"{100 * part.format_ok:.1f}",
        f"{100 * part.action_ok:.1f}",
        str(part.faults),
    ]


def describe_amounts(part: Part) -> str:
    """Format tool calls and response tokens of an episode with their intervals; empty without episodes."""
    shown = [
        f"{estimate.mean:,.{digits}f} {what}{_bound(estimate, digits)}"
        for estimate, digits, what in ((part.tool_calls, 2, "tool calls"), (part.response_tokens, 0, "response tokens"))
        if estimate is not None
    ]
    return f"an episode has {' and '.join(shown)}" if shown else ""


def _bound(estimate: Estimate, digits: int) -> str:
    if not math.isfinite(estimate.half):
        return ""
    return f" [{estimate.low:,.{digits}f}, {estimate.high:,.{digits}f}]"


@dataclass(frozen=True)
class Cell:
    """One figure of a table: a share in [0, 1], shown in percent; None without episodes."""

    heading: str
    estimate: Estimate | None

    @property
    def text(self) -> str:
        """The mean in percent, or a dash."""
        return "–" if self.estimate is None else f"{100 * self.estimate.mean:.1f}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"heading": self.heading, "estimate": self.estimate and plain_estimate(self.estimate)}


Columns = Callable[[Part, Mapping[str, Part], Mapping[str, Any]], list[Cell]]


def choose_samples(env_id: str, env_kwargs: Mapping[str, Any]) -> int:
    """Return the default number of episodes per task: 30 on AIME, else 1."""
    is_aime = _name_family(env_id) == "CodeInterpreter" and str(env_kwargs.get("dataset", "")).startswith("aime")
    return AIME_SAMPLES if is_aime else 1


def make_cells(env_id: str, env_kwargs: Mapping[str, Any], overall: Part, subtasks: Mapping[str, Part]) -> list[Cell]:
    """Return the columns of the environment's table in the paper; for other environments each subtask, and all."""
    return _TABLES.get(_name_family(env_id), _list_generic)(overall, subtasks, env_kwargs)


def has_paper_table(env_id: str) -> bool:
    """Return whether the paper has a table of the environment."""
    return _name_family(env_id) in _TABLES


def format_latex(name: str, cells: Sequence[Cell], *, intervals: bool = False) -> str:
    r"""Format a heading as a comment and a row ``name & 93.9 & … \\``, for a table of booktabs.

    Args:
        name: of the row; LaTeX's special characters are escaped.
        intervals: add half of each 95 % interval, as ``{\tiny$\pm$1.2}``.
    """
    shown = [_format_cell(cell, intervals) for cell in cells]
    headings = " & ".join(["Method", *(cell.heading.translate(_ESCAPES) for cell in cells)])
    return f"% {headings}\n{' & '.join([name.translate(_ESCAPES), *shown])} \\\\"


def _format_cell(cell: Cell, intervals: bool) -> str:
    if cell.estimate is None:
        return "--"
    half = 100 * cell.estimate.half
    return cell.text + (rf"{{\tiny$\pm${half:.1f}}}" if intervals and math.isfinite(half) else "")


def _name_family(env_id: str) -> str:
    """Return ``ALFWorld`` of ``spear/ALFWorld-v0``; other namespaces do not have a table."""
    namespace, _, name = env_id.rpartition(":")[2].rpartition("/")
    return name.rpartition("-v")[0] if namespace == "spear" else ""


def _list_household(overall: Part, subtasks: Mapping[str, Part], keywords: Mapping[str, Any]) -> list[Cell]:
    kinds = [Cell(kind.capitalize(), subtasks[kind].success if kind in subtasks else None) for kind in _ALFWORLD]
    return [*kinds, Cell("All", overall.success)]


def _list_mathematics(overall: Part, subtasks: Mapping[str, Part], keywords: Mapping[str, Any]) -> list[Cell]:
    name = str(keywords.get("dataset", "mini"))
    most = max(overall.pass_at, default=1)
    cells = [Cell(f"{name} mean@{most}", overall.success)]
    return [*cells, Cell(f"pass@{most}", overall.pass_at[most])] if most > 1 else cells


def _list_questions(overall: Part, subtasks: Mapping[str, Part], keywords: Mapping[str, Any]) -> list[Cell]:
    ordered = [name for name in _BENCHMARKS if name in subtasks]
    ordered += [name for name in subtasks if name not in _BENCHMARKS]
    benchmarks = [Cell(_BENCHMARKS.get(name, name), subtasks[name].success) for name in ordered]
    return [*benchmarks, Cell("Avg.", average_parts(subtasks.values()))]


def _list_generic(overall: Part, subtasks: Mapping[str, Part], keywords: Mapping[str, Any]) -> list[Cell]:
    return [*(Cell(name, part.success) for name, part in subtasks.items()), Cell("All", overall.success)]


_TABLES: Mapping[str, Columns] = {
    "ALFWorld": _list_household,
    "WebShop": lambda overall, subtasks, keywords: [Cell("Score", overall.scores), Cell("SR", overall.success)],
    "CodeInterpreter": _list_mathematics,
    "SearchR1": _list_questions,
    "Sokoban": lambda overall, subtasks, keywords: [Cell("Sokoban", overall.success)],
}


class _Responses(ProgressColumn):
    """Responses, tokens and cost so far, put into words only when they are shown."""

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
    """A progress bar with the wins so far, and with the turns, tokens and cost of this run.

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
        """Show an episode that has ended: an :class:`~spear_agents.evaluation.run.Observer`."""
        if trajectory is not None:
            self._faults += trajectory.fault is not None
            self._played += trajectory.fault is None
            self._wins += trajectory.won
        # A count, not a share: those who win end first.
        counts = ([f"{self._wins} won"] if self._played else []) + ([f"{self._faults} faults"] if self._faults else [])
        won = ", ".join(counts)
        self._progress.update(self._bar, description=self._title, completed=done, total=total, won=won)


@contextmanager
def watch_episodes(title: str, console: Console) -> Iterator[EpisodeBar]:
    """Show a progress bar on a terminal or in a notebook with ipywidgets, and a line every ten seconds elsewhere."""
    responses = _Responses()
    with (
        hold_console(console) as held,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[won]}"),
            responses,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=held,
            transient=True,
        ) as progress,
    ):
        yield EpisodeBar(title, progress, responses)
