"""Tables and the leaderboard, made from the ledger."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.ledger.entries import Entry, write_named_panel
from spear_agents.comparison.statistics import (
    Estimate,
    estimate_difference,
    estimate_mean,
    format_percent,
    split_numbers,
)
from spear_agents.evaluation.panels import open_panel
from spear_envs.core import SpearError
from spear_sandbox.errors import show_text

_TABLE = re.compile(r"(<!-- ledger: (?P<names>[^>]*?) -->\n).*?(?=<!-- end -->)", re.S)
"""A table: a comment with the names of its entries, and one that ends it."""


def fill_page(text: str, entries: Mapping[str, Entry]) -> str:
    """Update every table of a page, from ``<!-- ledger: BEFORE AFTER OTHERS… -->`` to ``<!-- end -->``.

    Raises SpearError if the page has no table, or one names entries that are not in the ledger.
    """

    def make(found: re.Match[str]) -> str:
        names = found["names"].split()
        missing = [name for name in names if name not in entries]
        if missing or len(names) < 2:
            wrong = f"{missing[0]!r} is not in the ledger" if missing else "two entries are needed"
            raise SpearError(f"{wrong}: mend the comment <!-- ledger: {found['names']} --> of the page.")
        before, after, *others = (entries[name] for name in names)
        return found[1] + format_gain(before, after, others) + "\n"

    filled, count = _TABLE.subn(make, text)
    if not count:
        raise SpearError("the page does not mark a table: write <!-- ledger: BEFORE AFTER --> and <!-- end -->.")
    return filled


def format_gain(before: Entry, after: Entry, others: Sequence[Entry] = ()) -> str:
    """Format the gain of a training as a Markdown table. Raises SpearError if the entries are not on the same tasks."""
    for entry in (after, *others):
        if entry.outcomes.keys() != before.outcomes.keys():
            raise SpearError(f"{entry.name} is on other tasks than {before.name}: a table is of one set of tasks.")
    rates = [{task: fmean(wins) for task, wins in entry.outcomes.items()} for entry in (before, after)]
    subtasks: dict[str, list[str]] = {}
    for task in sorted(write_named_panel(before.panel)["tasks"], key=lambda task: split_numbers(task["subtask"])):
        subtasks.setdefault(task["subtask"], []).append(task["id"])
    gain = estimate_difference([rates[1][task] - rates[0][task] for task in rates[0]])
    all_tasks = [_percent(estimate_mean(list(rate.values()))) for rate in rates]
    rows = [("all", *all_tasks, f"{100 * gain.mean:+.1f} [{100 * gain.low:+.0f}, {100 * gain.high:+.0f}]")]
    for name, tasks in subtasks.items():
        first, second = (fmean(rate[task] for task in tasks) for rate in rates)
        rows.append(
            (
                f"{escape_markdown(name)} ({len(tasks)})",
                f"{first:.1%}",
                f"{second:.1%}",
                f"{100 * (second - first):+.1f}",
            )
        )
    rows += [
        (f"{escape_markdown(entry.model or entry.engine)} play", _percent(entry.recompute()), "", "")
        for entry in others
    ]
    head = ("success", *(escape_markdown(entry.model or entry.engine) for entry in (before, after)), "points")
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    samples = len(next(iter(before.outcomes.values())))
    names = ", ".join(quote_markdown(entry.name) for entry in (before, after, *others))
    legend = (
        f"Panel `{before.panel}`: {len(rates[0])} tasks × {samples} samples, task fingerprint"
        f" `{before.fingerprint[:16]}`; rows by subtask (tasks); [95 % interval over tasks], differences paired by"
        f" task. Entries of the ledger: {names}."
    )
    return "\n".join([*lines, "", legend])


def _percent(estimate: Estimate) -> str:
    return f"{estimate.mean:.1%} [{estimate.low:.0%}, {estimate.high:.0%}]"


def format_leaderboard(entries: Sequence[Entry]) -> str:
    """Format the ledger as a page in Markdown: a table for each panel, the best first."""
    parts = [
        "# Leaderboard",
        "`python -m benchmarks.ledger page` writes this page from the files in `results/`, and `verify` recomputes"
        " every figure. The 95 % intervals are over tasks; another training may differ by more.",
    ]
    for name in dict.fromkeys(entry.panel for entry in entries):
        panel = open_panel(name)
        rows = sorted((e for e in entries if e.panel == name), key=lambda entry: -entry.recompute().mean)
        first = rows[0]
        parts.append(f"## {panel.name}")
        parts.append(
            f"{panel.title.capitalize()}: `{panel.env_id}`, split `{panel.split}`, {len(first.outcomes)} tasks ×"
            f" {panel.protocol.samples} samples at temperature {panel.protocol.temperature:g}, prompt"
            f" `{panel.protocol.template}`; tasks `{first.fingerprint[:12]}`, panel `{first.panel_digest[:12]}`."
        )
        lines = ["| player | success, % | weights | entry | notes |", "|---|---|---|---|---|"]
        for entry in rows:
            weights = f"`{entry.model_digest[:12]}`" if entry.model_digest else ""
            shown = format_percent(entry.recompute()).replace(" %", "")
            player, notes = escape_markdown(entry.model or entry.engine), escape_markdown(entry.notes)
            lines.append(f"| {player} | {shown} | {weights} | {quote_markdown(entry.name)} | {notes} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def escape_markdown(text: str) -> str:
    """Make text safe in a cell of Markdown: no markup, link, HTML or further cell; one line."""
    plain = show_text(" ".join(text.split()))
    plain = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\\[\]|])", r"\\\1", plain)


def quote_markdown(text: str) -> str:
    """Quote text as code in a cell of Markdown, which takes it as it is."""
    return f"`{re.sub('[`|]', '', show_text(' '.join(text.split())))}`"
