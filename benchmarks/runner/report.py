"""Results as tables, for the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.runner.figures import Figure, find_bar, format_value
from benchmarks.runner.registry import Benchmark
from benchmarks.runner.results import Judgement, Result, Verdict, judge
from spear_envs.core.errors import SpearError
from spear_envs.data.files import write_text

__all__ = ["count_verdicts", "fill_places", "format_table", "list_judgements", "make_markdown", "show_results"]

COLOURS = {Verdict.HELD: "green", Verdict.NOT_HELD: "bold red", Verdict.NOT_MEASURED: "yellow"}
BUSY = 1.5
"""Load average for each core above which times by the clock mean little."""


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table in Markdown, the first as its head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def fill_places(page: Path, sections: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- NAME -->`` and ``<!-- end -->`` on a page, for each name of ``sections``.

    Raises:
        SpearError: the page cannot be read or has no such place.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise SpearError(f"{page} cannot be read: {error.strerror}.") from error
    for name, section in sections.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = place.subn(lambda match, section=section: match[1] + section + match[2], text)  # type: ignore[misc]
        if not found:
            raise SpearError(f"{page} has no place for {name}: add <!-- {name} --> and <!-- end -->.")
    write_text(page, text)


def list_judgements(known: Sequence[Benchmark], results: Mapping[str, Result]) -> list[Judgement]:
    """Every bar with its verdict."""
    return [one for benchmark in known for one in judge(benchmark, results.get(benchmark.name))]


def count_verdicts(judgements: Sequence[Judgement]) -> str:
    """How many bars are held, are not, and were not measured."""
    counts = {verdict: sum(one.verdict is verdict for one in judgements) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())


def show_results(known: Sequence[Benchmark], results: Mapping[str, Result], console: Console) -> None:
    """The figures of each benchmark, then every bar with its verdict."""
    for benchmark in known:
        result = results.get(benchmark.name)
        if result is None:
            continue
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{benchmark.name}: {benchmark.summary}")
        for column in ("figure", "ours", "others", "bar", "verdict"):
            table.add_column(column, overflow="fold", justify="right" if column == "ours" else "left")
        for name, ours, others, bar, verdict in _list_rows(benchmark, result):
            shown = Text(verdict, style=COLOURS[Verdict(verdict)] if verdict else "")
            table.add_row(Text(name), Text(ours), Text(others), Text(bar), shown)
        console.print(Group(Text(""), table, Text(describe_result(result), style="dim")))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="bars")
    for column in ("benchmark", "figure", "bar", "measured", "verdict"):
        table.add_column(column, overflow="fold")
    judgements = list_judgements(known, results)
    for one in judgements:
        text = Text(one.verdict.value + (f" ({one.reason})" if one.reason else ""), style=COLOURS[one.verdict])
        table.add_row(*map(Text, (one.benchmark, one.bar.name, str(one.bar), _show_value(one))), text)
    console.print(Group(Text(""), table))
    console.print(f"{len(judgements)} bars: {count_verdicts(judgements)}", highlight=False)


def make_markdown(known: Sequence[Benchmark], results: Mapping[str, Result]) -> str:
    """The same for a page: bars that do not hold or were not measured, then each figure that has a bar or a peer."""
    judgements = list_judgements(known, results)
    lines = ["### Bars", "", f"{len(judgements)} bars: {count_verdicts(judgements)}.", ""]
    lines += ["| benchmark | bars that do not hold | bar | measured |", "|---|---|---|---|"]
    for one in judgements:
        if one.verdict is Verdict.NOT_HELD:
            lines.append(_make_row(f"`{one.benchmark}`", one.bar.name, str(one.bar), _show_value(one)))
    lines += ["", "| benchmark | bars that were not measured | why |", "|---|---|---|"]
    unmeasured = [one for one in judgements if one.verdict is Verdict.NOT_MEASURED]
    for (benchmark_name, reason), group in groupby(unmeasured, key=lambda one: (one.benchmark, one.reason)):
        lines.append(_make_row(f"`{benchmark_name}`", str(sum(1 for _ in group)), reason))
    for benchmark in known:
        result = results.get(benchmark.name)
        rows = [] if result is None else [row for row in _list_rows(benchmark, result) if row[2] or row[3]]
        if result is None or not rows:
            continue
        lines += ["", f"### {benchmark.name}", "", benchmark.summary, "", describe_result(result), ""]
        lines += ["| figure | ours | others | bar | verdict |", "|---|---|---|---|---|"]
        lines += [_make_row(*row) for row in rows]
    return "\n".join(lines) + "\n"


def describe_result(result: Result) -> str:
    """Where, when and how a benchmark was run, and how it ended."""
    hardware = result.hardware
    machine = f"{hardware['cores']} cores, {hardware['machine']}, {hardware['memory_gb']} GB"
    busy = max(result.load) / max(hardware["cores"], 1) > BUSY
    load = f"load {' to '.join(f'{value:.1f}' for value in result.load)}"
    load += ": other programs ran beside it, so times by the clock mean little" if busy else ""
    parts = [f"{result.status.value}{f' ({result.reason})' if result.reason else ''}", f"size {result.size.value}"]
    parts += [f"{result.seconds:,.0f} s, {result.cpu_seconds:,.0f} s of CPU", machine, load]
    parts += [f"pace {result.pace:.2f}", result.date]
    versions = ", ".join(f"{name} {found}" for name, found in result.versions.items())
    return "; ".join([*parts, versions]) + "."


def _list_rows(benchmark: Benchmark, result: Result) -> Iterator[tuple[str, str, str, str, str]]:
    for name, group in groupby(_bring_together(result.figures), key=lambda figure: figure.name):
        figures = list(group)
        ours = next((figure for figure in figures if not figure.of), None)
        others = ", ".join(_show_other(figure, ours) for figure in figures if figure.of)
        note = f" ({ours.note})" if ours is not None and ours.note else ""
        bars = [bar for bar in benchmark.bars if bar.applies_to(result.size)]
        bar = None if ours is None else find_bar(ours, bars)
        if ours is None or bar is None:
            verdict = ""
        else:
            verdict = (Verdict.HELD if bar.holds(ours.value, result.pace) else Verdict.NOT_HELD).value
        value = "" if ours is None else f"{format_value(ours.value)} {ours.unit}".rstrip()
        yield name + note, value, others, "" if bar is None else str(bar), verdict


def _bring_together(figures: Sequence[Figure]) -> list[Figure]:
    """Figures of one name beside one another, each name where it came first."""
    first: dict[str, int] = {}
    for place, figure in enumerate(figures):
        first.setdefault(figure.name, place)
    return sorted(figures, key=lambda figure: first[figure.name])


def _show_other(figure: Figure, ours: Figure | None) -> str:
    value = f"{figure.of}: {format_value(figure.value)} {figure.unit}".rstrip()
    if ours is None or not ours.value or not figure.value:
        return value
    ratio = max(figure.value / ours.value, ours.value / figure.value)
    return f"{value} ({format_value(ratio)} times {'ours' if figure.value > ours.value else 'less'})"


def _show_value(one: Judgement) -> str:
    return "" if one.value is None else f"{format_value(one.value)} {one.bar.unit}".rstrip()


def _make_row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
