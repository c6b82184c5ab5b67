"""Report of a comparison from its file of results: tables, curves, and the seeds that a difference needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.comparison import Comparison
from benchmarks.runner.report import format_table
from spear_agents.comparison.significance import count_pairs, estimate_crossed
from spear_agents.comparison.statistics import Estimate
from spear_envs.core.errors import SpearError

POINTS = (1.0, 2.0, 5.0)
"""Differences in the table of power."""
MOST = 1000
"""Maximum number of seeds in the table of power."""


@dataclass(frozen=True)
class Difference:
    """An arm over its base, in points of success.

    Attributes:
        estimate: mean with its 95 % interval over seeds and tasks, paired by both.
        above: seeds with a difference above 0.
        deviation: of the difference between seeds.
    """

    arm: str
    base: str
    estimate: Estimate
    above: int
    deviation: float


class Findings:
    """Results of a comparison, checked against its file.

    Raises SpearError if the results are of another comparison, or incomplete.
    """

    def __init__(self, comparison: Comparison, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            digests = {content["digest"], *(run["digest"] for run in content["runs"])}
            settled = {(run["arm"], run["rate"], len(run["won"])) for run in content["runs"]}
            wanted = {(arm, rate, len(content["tasks"])) for arm, rate, _ in settled}
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise SpearError(f"{path} is not a result of spear lab run: {error}") from None
        if digests != {comparison.digest}:
            raise SpearError(
                f"{path} is not of this file: it is registered as {comparison.digest[:12]}, the results as "
                f"{', '.join(sorted(one[:12] for one in digests))}; report them with their own file"
            )
        if settled != wanted or sorted(arm for arm, *_ in settled) != sorted(comparison.arms):
            raise SpearError(f"{path} has other arms, several rates of one, or runs on other tasks than it lists")
        self.comparison, self.content = comparison, content
        self.runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in comparison.arms}
        """Reported runs of each arm, by seed."""
        for run in content["runs"]:
            self.runs[run["arm"]].append(run)
        for arm, runs in self.runs.items():
            if sorted(run["seed"] for run in runs) != list(range(comparison.seeds)):
                raise SpearError(f"{path} lacks some of {comparison.seeds} seeds of {arm}: let spear lab run finish")
            runs.sort(key=lambda run: run["seed"])

    def table(self, arm: str) -> np.ndarray:
        """Success in points, [seeds, tasks]."""
        return np.asarray([run["won"] for run in self.runs[arm]]) / 10.0

    def measure(self, pair: tuple[str, str]) -> Difference:
        """The difference of two arms."""
        self.comparison.check_pair(pair)
        steps = self.table(pair[0]) - self.table(pair[1])
        by_seed = steps.mean(1)
        deviation = float(by_seed.std(ddof=1))
        return Difference(*pair, _estimate_points(steps), int((by_seed > 0).sum()), deviation)

    def write_tables(self, explored: Sequence[tuple[str, str]] = ()) -> str:
        """Format all tables as Markdown; unregistered differences in ``explored`` are marked."""
        comparison = self.comparison
        settings = comparison.training
        unregistered = [pair for pair in explored if pair not in comparison.compare]
        levels, start = len(self.content["tasks"]), 100 * self.content["start"]
        code = ", ".join(sorted({run["code"][:12] for runs in self.runs.values() for run in runs}))
        lines = [
            f"{comparison.title}. {comparison.seeds} seeds an arm, {settings.budget:,} tokens a run, "
            f"{settings.tasks} × {settings.group} episodes a step; {comparison.describe_measure()}, on {levels} levels "
            f"({comparison.panel.value}); start {start:.1f} %. "
            f"Registered {comparison.digest[:12]}, code {code}.",
            "",
            format_table(self._list_arms()),
            "",
            format_table(self._list_differences(comparison.compare)),
        ]
        if unregistered:
            lines += ["", "**Explored, not registered:**", "", format_table(self._list_differences(unregistered))]
        return "\n".join(lines) + "\n"

    def _list_arms(self) -> list[list[str]]:
        rows = [["arm", "rate", "success, %", "rollouts, %", "entropy, nats", "rows replayed", "steps"]]
        for name, runs in self.runs.items():
            success = _estimate_points(self.table(name))
            rolled, entropy = (
                np.mean([[run[key][0], run[key][-1]] for run in runs], 0) for key in ("rollouts", "entropy")
            )
            rows.append(
                [
                    self.comparison.arms[name].title or name,
                    f"{runs[0]['rate']:g}",
                    f"{success.mean:.1f} [{max(0.0, success.low):.1f}, {success.high:.1f}]",
                    f"{100 * rolled[0]:.1f} → {100 * rolled[1]:.1f}",
                    f"{entropy[0]:.2f} → {entropy[1]:.2f}",
                    f"{np.mean([run['replayed'] for run in runs]):,.0f}",
                    f"{np.mean([run['steps'] for run in runs]):.0f}",
                ]
            )
        return rows

    def _list_differences(self, pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
        rows = [["arm", "over", "points", "seeds above 0", *(f"seeds for {points:g}" for points in POINTS)]]
        for pair in pairs:
            found = self.measure(pair)
            titles = [self.comparison.arms[name].title or name for name in pair]
            estimate = found.estimate
            shown = f"{estimate.mean:+.1f} [{estimate.low:+.1f}, {estimate.high:+.1f}]"
            if estimate.low > 0 or estimate.high < 0:
                shown = f"**{shown}**"
            above = f"{found.above} of {self.comparison.seeds}"
            rows.append([*titles, shown, above, *(_count_seeds(found.deviation, points) for points in POINTS)])
        return rows


def _count_seeds(deviation: float, points: float) -> str:
    """Number of seeds that detect a difference of ``points`` with 80 % power, as text."""
    if not deviation:
        return "–"
    if deviation * 3 > points * np.sqrt(MOST):
        return f"> {MOST}"
    return str(count_pairs(deviation, points))


def _estimate_points(table: np.ndarray) -> Estimate:
    """The estimate over a table in points, [seeds, tasks]."""
    found = estimate_crossed((table / 100).tolist())
    return Estimate(100 * found.mean, 100 * found.low, 100 * found.high, found.tasks)
