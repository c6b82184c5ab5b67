"""Pages with tables made from the ledger."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from spear_agents.panels.ledger import Entry, escape_markdown, quote_markdown, write_named_panel
from spear_agents.statistics import Estimate, estimate_difference, estimate_mean, split_numbers
from spear_envs.core import SpearError

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
