"""The paper's table of each environment: its columns, its number of samples, rows for LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear_agents.statistics import Estimate, Part, average_parts, plain_estimate

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
        """Plain values."""
        return {"heading": self.heading, "estimate": self.estimate and plain_estimate(self.estimate)}


Columns = Callable[[Part, Mapping[str, Part], Mapping[str, Any]], list[Cell]]


def choose_samples(env_id: str, env_kwargs: Mapping[str, Any]) -> int:
    """Default number of episodes per task: 30 on AIME, else 1."""
    is_aime = _name_family(env_id) == "CodeInterpreter" and str(env_kwargs.get("dataset", "")).startswith("aime")
    return AIME_SAMPLES if is_aime else 1


def make_cells(env_id: str, env_kwargs: Mapping[str, Any], overall: Part, subtasks: Mapping[str, Part]) -> list[Cell]:
    """The columns of the environment's table in the paper; for other environments each subtask, and all."""
    return _TABLES.get(_name_family(env_id), _list_generic)(overall, subtasks, env_kwargs)


def has_paper_table(env_id: str) -> bool:
    """Whether the paper has a table of the environment."""
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
    """``ALFWorld`` of ``spear/ALFWorld-v0``; other namespaces do not have a table."""
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
