"""Tables and pictures of the ablation, made of the recorded results alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from agents.files import write_text
from agents.statistics import Estimate, estimate_mean
from benchmarks._ablation_plan import ARMS, BASES, TUNING_SEED, Scenario
from benchmarks._ablation_run import WARM_START, choose_rates, read_result

__all__ = ["print_report", "write_report"]

SMOOTH = 9
"""Steps of the running mean in pictures."""
TAIL = 0.1
"""Share of the steps that "first" and "last" figures are means over."""
PANELS = (
    ("success of the rollouts", "success"),
    ("entropy (nats per token)", "entropy"),
    ("tool calls an episode", "tool_calls"),
    ("rows replayed so far", "drawn"),
)


@dataclass(frozen=True)
class ArmResult:
    """The recorded runs of one arm, one a seed."""

    arm: str
    rate: str
    runs: Sequence[Mapping[str, Any]]

    @property
    def won(self) -> dict[str, float]:
        """Share won of each task of the test panel, mean over seeds."""
        return {
            task: fmean(run["test_panel"]["won"][task] for run in self.runs)
            for task in self.runs[0]["test_panel"]["won"]
        }

    def average(self, name: str, part: slice | None = None) -> float:
        """Mean of a curve over steps and seeds; of its first or last tenth where ``part`` says so."""
        values = [value or 0.0 for run in self.runs for value in run["curves"][name][part or slice(None)]]
        return fmean(values)

    @property
    def tenth(self) -> int:
        """Number of steps in a tenth of the run."""
        return max(1, round(TAIL * len(self.runs[0]["curves"]["success"])))


def compare(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean over tasks of ``after - before``, with the interval of that paired difference.

    Raises:
        ValueError: the two are not on the same tasks.
    """
    if before.keys() != after.keys():
        raise ValueError("the results are not on the same tasks")
    return estimate_mean([after[task] - before[task] for task in before])


def read_arms(scenario: Scenario, results: Path) -> list[ArmResult]:
    """Arms of which at least one seed is recorded, in the order of the scenario."""
    found = []
    for arm, rate in choose_rates(results, scenario).items():
        runs = [read_result(results, scenario, trial.name) for trial in scenario.list_reported(arm, rate)]
        recorded = [run for run in runs if run is not None]
        if recorded:
            found.append(ArmResult(arm, rate, recorded))
    return found


def make_tables(scenario: Scenario, results: Path) -> str:
    """The scenario's section: how it was made, the table of results and the table of the curves."""
    start = read_result(results, scenario, WARM_START)
    arms = read_arms(scenario, results)
    if start is None or not arms:
        return f"No result of {scenario.title} is recorded yet.\n"
    panel = start["test_panel"]
    parts = [
        _make_head(scenario, arms, panel),
        _make_success_table(start, arms),
        _make_curve_table(arms),
    ]
    if len(scenario.rates) > 1:
        parts.append(_make_tuning_table(scenario, results))
    return "\n\n".join(parts) + "\n"


def _make_head(scenario: Scenario, arms: Sequence[ArmResult], panel: Mapping[str, Any]) -> str:
    run = arms[0].runs[0]
    codes = sorted({run["code"] for arm in arms for run in arm.runs})
    return (
        f"{scenario.title}: {run['steps']} steps, {run['episodes']:,} episodes a run; test panel `{panel['split']}`, "
        f"{len(panel['won'])} tasks × {panel['samples']} samples at temperature {panel['temperature']:g}, fingerprint "
        f"`{panel['fingerprint'][:12]}`; code {', '.join(codes)}."
    )


def _make_success_table(start: Mapping[str, Any], arms: Sequence[ArmResult]) -> str:
    reference = start["test_panel"]["won"]
    rows = [
        ["arm", "learning rate", "success on test, %", "seeds", "over the warm start", "over the arm without"],
        ["warm start", "", _percent(estimate_mean(list(reference.values()))), "", "", ""],
    ]
    by_arm = {result.arm: result for result in arms}
    for result in arms:
        won = result.won
        base = by_arm.get(BASES.get(result.arm, ""))
        # Seeds that only one of the two has yet would compare luck.
        paired = base is not None and len(base.runs) == len(result.runs)
        rows.append(
            [
                ARMS[result.arm],
                result.rate,
                _percent(estimate_mean(list(won.values()))),
                " / ".join(f"{100 * run['test_panel']['mean']:.1f}" for run in result.runs),
                _points(compare(reference, won)),
                f"{_points(compare(base.won, won))} ({ARMS[base.arm]})" if base is not None and paired else "",
            ]
        )
    return _format_table(rows)


def _make_curve_table(arms: Sequence[ArmResult]) -> str:
    rows = [
        [
            "arm, first → last tenth",
            "success of the rollouts, %",
            "entropy, nats",
            "tool calls",
            "turns",
            "well formed, %",
            "valid actions, %",
            "rows replayed a step",
            "seconds a step",
        ]
    ]
    for result in arms:
        first, last = slice(0, result.tenth), slice(-result.tenth, None)

        def span(name: str, digits: int, factor: float = 1.0) -> str:
            ends = (factor * result.average(name, part) for part in (first, last))  # noqa: B023
            return " → ".join(f"{end:.{digits}f}" for end in ends)

        rows.append(
            [
                ARMS[result.arm],
                span("success", 1, 100),
                span("entropy", 2),
                span("tool_calls", 1),
                span("turns", 1),
                span("well_formed", 1, 100),
                span("valid_action", 1, 100),
                f"{result.average('drawn'):.0f}",
                f"{result.average('seconds'):.1f}",
            ]
        )
    return _format_table(rows)


def _make_tuning_table(scenario: Scenario, results: Path) -> str:
    rows = [["arm", *(f"valid panel at {rate}, %" for rate in scenario.rates), "chosen", "valid panel, other seeds, %"]]
    for arm, chosen in choose_rates(results, scenario).items():
        tuned = [read_result(results, scenario, trial.name) for trial in scenario.list_tuning(arm)]
        runs = [read_result(results, scenario, trial.name) for trial in scenario.list_reported(arm, chosen)]
        shown = [f"{100 * run['valid_panel']['mean']:.1f}" for run in tuned if run is not None]
        others = [f"{100 * run['valid_panel']['mean']:.1f}" for run in runs if run is not None]
        rows.append([ARMS[arm], *(shown or [""]), chosen, " / ".join(others)])
    return f"Learning rates, chosen by a run of seed {TUNING_SEED}:\n\n{_format_table(rows)}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _points(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def plot_scenario(scenario: Scenario, results: Path, path: Path) -> None:
    """Draw the curves of all arms: mean over seeds, and the range of the seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(16, 3.8), layout="constrained")
    for number, result in enumerate(read_arms(scenario, results)):
        for axis, (title, name) in zip(axes, PANELS, strict=True):
            curves = np.asarray([[value or 0.0 for value in run["curves"][name]] for run in result.runs])
            curves = curves.cumsum(1) if name == "drawn" else np.apply_along_axis(_smooth, 1, curves)
            if name == "drawn" and not curves.any():
                continue
            steps = np.arange(1, curves.shape[1] + 1)
            axis.plot(steps, curves.mean(0), color=f"C{number}", label=ARMS[result.arm], linewidth=1.4)
            axis.fill_between(steps, curves.min(0), curves.max(0), color=f"C{number}", alpha=0.12, linewidth=0)
            axis.set_title(title, fontsize=10, loc="left")
            axis.set_xlabel("step", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{scenario.title}: mean of {len(scenario.seeds)} seeds, band from lowest to highest", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _smooth(values: np.ndarray) -> np.ndarray:
    return np.asarray([values[max(0, i - SMOOTH + 1) : i + 1].mean() for i in range(len(values))])


def print_report(scenarios: Sequence[Scenario], results: Path, console: Console) -> None:
    """Print the tables."""
    for scenario in scenarios:
        console.print(make_tables(scenario, results), markup=False)


def write_report(scenarios: Sequence[Scenario], results: Path, page: Path) -> None:
    """Replace what stands between ``<!-- ablation NAME -->`` and ``<!-- end -->`` on a page; draw into its ``images``.

    Raises:
        ValueError: the page has no such place for a scenario.
    """
    text = page.read_text(encoding="utf-8")
    for scenario in scenarios:
        section = make_tables(scenario, results)
        if read_arms(scenario, results):
            image = f"images/ablation-{scenario.name}.png"
            plot_scenario(scenario, results, page.parent / image)
            section += f"\n![Curves of {scenario.title}]({image})\n"
        place = re.compile(rf"(<!-- ablation {scenario.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = place.subn(lambda match, section=section: match[1] + section + match[2], text)  # type: ignore[misc]
        if not found:
            raise ValueError(
                f"{page} has no place for {scenario.name}: add <!-- ablation {scenario.name} --> and <!-- end -->"
            )
    write_text(page, text)
