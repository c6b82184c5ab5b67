"""Tables of the ablation, and the page they stand on, made of the recorded results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.ablations.plan import ARMS, TUNING_SEED, Scenario
from benchmarks.ablations.plots import plot_curves, plot_overview
from benchmarks.ablations.results import ArmResult, compare_arms, compare_with_start, pool_seeds, read_arms
from benchmarks.ablations.run import WARM_START, choose_rates, read_result
from benchmarks.runner.report import fill_places, format_table
from spear_agents.comparison.significance import estimate_over_seeds
from spear_agents.comparison.statistics import Estimate, estimate_mean

__all__ = ["print_report", "write_report"]


def make_tables(scenario: Scenario, results: Path) -> str:
    """The scenario's section: how it was made, and the table of results."""
    start = read_result(results, scenario, WARM_START)
    arms = read_arms(scenario, results)
    if start is None or not arms:
        return f"No result of {scenario.title} is recorded yet.\n"
    panel = start["test_panel"]
    parts = [_make_head(scenario, arms, panel), _make_success_table(start, arms)]
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
        [
            "arm",
            "learning rate",
            "success on test, %",
            "seeds",
            "over the warm start",
            "over the arm without",
            "over tasks alone",
        ],
        ["warm start", "", _percent(estimate_mean(list(reference.values()))), "", "", "", ""],
    ]
    for result in arms:
        paired, beside, alone = compare_arms(arms, result), "", ""
        if paired is not None:
            base, seeds = paired.base, paired.seeds
            of = "" if len(seeds) == len(result.runs) == len(base.runs) else f", seeds {_list(seeds)} of both"
            beside = f"{_points(paired.difference)} ({ARMS[base.arm]}{of})"
            alone = _points(paired.tasks_alone)
        rows.append(
            [
                ARMS[result.arm],
                result.rate,
                _percent(result.success),
                " / ".join(f"{100 * run['test_panel']['mean']:.1f}" for run in result.runs),
                _points(compare_with_start(reference, result)),
                beside,
                alone,
            ]
        )
    return format_table(rows)


def make_pooled_table(scenarios: Sequence[Scenario], results: Path) -> str:
    """Self-imitation and SPEAR beside GRPO over all pairs of runs of one seed; Student's interval over the pairs."""
    every = [read_arms(scenario, results) for scenario in scenarios]
    rows = [["over GRPO, points", "pairs", "test panels", "second panels", "rollouts of the second half", "above 0"]]
    for arm in ("grpo_sil", "grpo_spear"):
        found = [pool_seeds(every, arm, "grpo", panel) for panel in ("test_panel", "valid_panel", None)]
        if len(found[0]) > 1:
            shown = [_points(estimate_over_seeds(values)) for values in found]
            above = " / ".join(str(sum(value > 0 for value in values)) for values in found)
            rows.append([ARMS[arm], str(len(found[0])), *shown, above])
    return format_table(rows) + "\n"


def _make_tuning_table(scenario: Scenario, results: Path) -> str:
    rows = [["arm", *(f"valid panel at {rate}, %" for rate in scenario.rates), "chosen", "valid panel, other seeds, %"]]
    for arm, chosen in choose_rates(results, scenario).items():
        tuned = [read_result(results, scenario, trial.name) for trial in scenario.list_tuning(arm)]
        runs = [read_result(results, scenario, trial.name) for trial in scenario.list_reported(arm, chosen)]
        shown = [f"{100 * run['valid_panel']['mean']:.1f}" for run in tuned if run is not None]
        others = [f"{100 * run['valid_panel']['mean']:.1f}" for run in runs if run is not None]
        rows.append([ARMS[arm], *(shown or [""]), chosen, " / ".join(others)])
    return f"Learning rates, chosen by a run of seed {TUNING_SEED}:\n\n{format_table(rows)}"


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _points(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def print_report(scenarios: Sequence[Scenario], results: Path, console: Console) -> None:
    """Print the tables."""
    for scenario in scenarios:
        console.print(make_tables(scenario, results), markup=False)
    console.print(make_pooled_table(scenarios, results), markup=False)


def write_report(scenarios: Sequence[Scenario], results: Path, page: Path) -> None:
    """Fill the places of the scenarios, ``<!-- ablation NAME -->``, on a page; draw into its ``images``.

    Raises:
        SpearError: the page has no such place for a scenario.
    """
    sections = {}
    for scenario in scenarios:
        section = make_tables(scenario, results)
        start, arms = read_result(results, scenario, WARM_START), read_arms(scenario, results)
        if start is not None and arms:
            overview, curves = (f"images/ablation-{scenario.name}{part}.png" for part in ("", "-curves"))
            reference = estimate_mean(list(start["test_panel"]["won"].values()))
            plot_overview(scenario, reference, arms, page.parent / overview)
            plot_curves(scenario, arms, page.parent / curves)
            section += f"\n![Results of {scenario.title}]({overview})\n\n![Curves of {scenario.title}]({curves})\n"
        sections[f"ablation {scenario.name}"] = section
    fill_places(page, sections | {"ablation pooled": make_pooled_table(scenarios, results)})
