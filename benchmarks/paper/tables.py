"""A table of the paper made of evaluations, as Markdown and for LaTeX, and the cells that it lacks."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.paper.jobs import Choice, Flavour, Job, Result, read_table
from benchmarks.runner.report import format_table
from spear_agents.comparison.significance import estimate_over_seeds
from spear_agents.comparison.statistics import Estimate
from spear_agents.comparison.tables import Cell, format_latex

MINUS = "−"


@dataclass(frozen=True)
class Missing:
    """Evaluations that a table lacks, of one row and model on one environment, and the command that makes them."""

    name: str
    reasons: Sequence[str]
    command: str


@dataclass(frozen=True)
class Gathered:
    """The results of the chosen jobs, and why the others have none, both by name."""

    choice: Choice
    jobs: Sequence[Job]
    results: Mapping[str, Result]
    reasons: Mapping[str, str]

    @property
    def missing(self) -> list[Missing]:
        """Results that the table lacks, row by row."""
        groups: dict[tuple[str, str, str], list[Job]] = {}
        for job in self.jobs:
            if job.name in self.reasons:
                groups.setdefault((job.model, job.row.name, job.environment.name), []).append(job)
        return [
            Missing(
                f"{model}, {row}, {environment}",
                [f"seed {job.seed}: {self.reasons[job.name]}" for job in found],
                self._make_command(row, model, environment),
            )
            for (model, row, environment), found in groups.items()
        ]

    def _make_command(self, row: str, model: str, environment: str) -> str:
        choice, default = self.choice, Choice()
        words = ["python", "-m", "benchmarks.paper", "table1", "--rows", row]
        words += ["--environments", environment, "--seeds", str(choice.seeds)]
        if choice.flavour is Flavour.TINY:
            words += ["--tiny"]
        else:
            words += ["--models", model]
            words += ["--flavour", choice.flavour.value] if choice.flavour is not default.flavour else []
            words += ["--cluster", choice.cluster] if choice.cluster != default.cluster else []
        words += ["--best"] if choice.best else []
        words += ["--out", str(choice.out)] if choice.out != default.out else []
        return shlex.join(words)

    def find(self, model: str, row: str, environment: str) -> dict[int, Result]:
        """Results by seed."""
        wanted = (model, row, environment)
        return {
            job.seed: self.results[job.name]
            for job in self.jobs
            if (job.model, job.row.name, job.environment.name) == wanted and job.name in self.results
        }


def gather(choice: Choice) -> Gathered:
    """Read the results of the chosen jobs. Raises SpearError for a pattern that fits nothing, or missing data."""
    jobs, results, reasons = choice.list_jobs(), {}, {}
    for job in jobs:
        result, reason = job.read()
        if result is None:
            reasons[job.name] = reason
        else:
            results[job.name] = result
    return Gathered(choice, jobs, results, reasons)


def make_cells(gathered: Gathered, model: str, row: str) -> list[Cell]:
    """The cells of a row: means over seeds with Student's interval, or over tasks where there is one seed."""
    cells = []
    for environment in read_table().environments.values():
        found = gathered.find(model, row, environment.name)
        for place, heading in enumerate(environment.columns):
            estimates = [result.cells[place].estimate for result in found.values()]
            known = [estimate for estimate in estimates if estimate is not None]
            cells.append(Cell(heading, _average(known) if known else None))
    return cells


def _average(estimates: Sequence[Estimate]) -> Estimate:
    return estimates[0] if len(estimates) == 1 else estimate_over_seeds([estimate.mean for estimate in estimates])


def quote_cells(model: str, row: str) -> list[Cell]:
    """The paper's own figures of a row, which have no interval."""
    table = read_table()
    headings = [heading for environment in table.environments.values() for heading in environment.columns]
    figures = table.figures[model][row]
    return [Cell(heading, _as_estimate(figure)) for heading, figure in zip(headings, figures, strict=True)]


def _as_estimate(percent: float) -> Estimate:
    return Estimate(percent / 100, -math.inf, math.inf, 0)


def format_cell(cell: Cell) -> str:
    """A mean in percent and half of its interval, if there is one."""
    if cell.estimate is None or not math.isfinite(cell.estimate.half):
        return cell.text
    return f"{cell.text} ± {100 * cell.estimate.half:.1f}"


# ---- Markdown --------------------------------------------------------------------------------------------------------
def make_markdown(gathered: Gathered) -> str:
    """The table of each model, the gains of SPEAR, what the evaluations were, and what is missing."""
    models = dict.fromkeys(job.model for job in gathered.jobs)
    parts = [_make_model(gathered, model) for model in models]
    gains = _make_gains(gathered, list(models))
    parts += [gains] if gains else []
    parts += [_describe(gathered), _list_missing(gathered)]
    return "\n\n".join(parts) + "\n"


def _make_model(gathered: Gathered, model: str) -> str:
    table = read_table()
    headings = [heading for environment in table.environments.values() for heading in environment.columns]
    is_quoted = model in table.figures
    lines = [["", "method", "seeds", *headings]]
    for row in dict.fromkeys(job.row for job in gathered.jobs):
        counts = [len(gathered.find(model, row.name, name)) for name in table.environments]
        seeds = " / ".join(map(str, dict.fromkeys(counts)))
        cells = [format_cell(cell) for cell in make_cells(gathered, model, row.name)]
        lines.append([row.type, row.title, seeds, *cells])
        if is_quoted:
            lines.append(
                ["", f"*{row.title}, paper*", "", *(f"*{cell.text}*" for cell in quote_cells(model, row.name))]
            )
    return f"**{gathered.choice.known_models[model]}**, %\n\n{format_table(lines)}"


def _make_gains(gathered: Gathered, models: Sequence[str]) -> str:
    """Points of each row with SPEAR over its base, over the seeds that both have, and the paper's."""
    table, titles = read_table(), gathered.choice.known_models
    lines = [["model", "over its base", "environment", "seeds", "points", "paper"]]
    for model in models:
        for row in dict.fromkeys(job.row for job in gathered.jobs if job.row.over):
            first = 0
            for environment in table.environments.values():
                last = first + len(environment.columns) - 1  # All, or SR
                first = last + 1
                before = gathered.find(model, str(row.over), environment.name)
                after = gathered.find(model, row.name, environment.name)
                steps = [_subtract(after[seed], before[seed]) for seed in after if seed in before]
                if not steps:
                    continue
                paper = ""
                if model in table.figures:
                    figures = table.figures[model]
                    paper = _sign(figures[row.name][last] - figures[str(row.over)][last])
                points = _format_points(estimate_over_seeds(steps))
                lines.append([titles[model], row.title, environment.title, str(len(steps)), points, paper])
    if len(lines) == 1:
        return ""
    if not set(models) & table.figures.keys():
        lines = [line[1:-1] for line in lines]  # one model, which the paper has not
    return f"Success over the row without SPEAR, paired by seed:\n\n{format_table(lines)}"


def _subtract(after: Result, before: Result) -> float:
    """Success of the one minus that of the other."""
    first, second = after.cells[-1].estimate, before.cells[-1].estimate
    assert first is not None and second is not None
    return first.mean - second.mean


def _format_points(difference: Estimate) -> str:
    points = _sign(100 * difference.mean)
    if not math.isfinite(difference.half):
        return points
    return f"{points} [{_sign(100 * difference.low)}, {_sign(100 * difference.high)}]"


def _sign(points: float) -> str:
    return f"{points:+.1f}".replace("-", MINUS)


def _describe(gathered: Gathered) -> str:
    """Return what was trained and played, and what an interval covers."""
    lines = []
    for environment in dict.fromkeys(job.environment.name for job in gathered.jobs):
        jobs = [job for job in gathered.jobs if job.environment.name == environment]
        title = read_table().environments[environment].title
        trained = dict.fromkeys(shlex.join(_show_words(job)) for job in jobs if job.row.method is None)
        lines += [f"- {title}, trained with `{words}`." for words in trained]
        rows: dict[str, list[str]] = {}
        for job in jobs:
            if (result := gathered.results.get(job.name)) is not None and result.panel is not None:
                played = f"panel `{result.panel.label}`, {job.environment.tasks} tasks"
                rows.setdefault(played, []).append(job.row.title if job.row.method else "rows that train")
        lines += [f"- {title}, {', '.join(dict.fromkeys(names))}: {played}." for played, names in rows.items()]
    which = "best in validation" if gathered.choice.best else "last"
    lines.append(f"- Rows that train play with their {which} checkpoint.")
    lines.append("- ± is half of a 95 % interval: Student's over seeds, or over tasks where there is one seed.")
    return "\n".join(lines)


def _show_words(job: Job) -> list[str]:
    """The arguments of a training that its algorithm and its seed do not change, without the place of the policy."""
    return [word for word in job.words if not word.startswith(("algorithm=", "model.path=", "seed="))]


def _list_missing(gathered: Gathered) -> str:
    if not gathered.missing:
        return f"Nothing is missing: {len(gathered.jobs)} evaluations."
    lines = [f"{len(gathered.reasons)} of {len(gathered.jobs)} evaluations are missing:", ""]
    for each in gathered.missing:
        lines += [f"- {each.name} ({'; '.join(each.reasons)}):", f"  `{each.command}`"]
    return "\n".join(lines)


# ---- LaTeX -----------------------------------------------------------------------------------------------------------
def make_latex(gathered: Gathered) -> str:
    """The table for booktabs, with the paper's figures in grey below ours."""
    table = read_table()
    environments = list(table.environments.values())
    width = 2 + sum(len(environment.columns) for environment in environments)
    groups = [f"\\multicolumn{{{len(each.columns)}}}{{c}}{{{each.title}}}" for each in environments]
    headings = [heading for environment in environments for heading in environment.columns]
    lines = [
        "% needs booktabs and xcolor",
        f"\\begin{{tabular}}{{ll{'r' * (width - 2)}}}",
        "\\toprule",
        f" &  & {' & '.join(groups)} \\\\",
        f"Type & Method & {' & '.join(headings)} \\\\",
    ]
    for model in dict.fromkeys(job.model for job in gathered.jobs):
        lines += [
            "\\midrule",
            f"\\multicolumn{{{width}}}{{c}}{{\\textit{{{gathered.choice.known_models[model]}}}}} \\\\",
        ]
        for row in dict.fromkeys(job.row for job in gathered.jobs):
            lines.append(f"{row.type} & {_format_row(row.title, make_cells(gathered, model, row.name))}")
            if model in table.figures:
                cells = quote_cells(model, row.name)
                quoted = " & ".join(f"\\textcolor{{gray}}{{{cell.text}}}" for cell in cells)
                lines.append(f" & \\textcolor{{gray}}{{paper}} & {quoted} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _format_row(title: str, cells: Sequence[Cell]) -> str:
    return format_latex(title, cells, intervals=True).partition("\n")[2]
