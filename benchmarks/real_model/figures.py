"""Figures, tables and pictures from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.real_model.records import COLD, METRICS, Plan, Record
from spear_agents.comparison.significance import compute_permutation_p, estimate_crossed
from spear_agents.comparison.statistics import Estimate, estimate_mean, format_percent
from spear_training.run.training import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#7a8288", "#2a6f97", "#b5651d")
SHORT = {
    "small": "240 games in small rooms, 12 turns",
    "unseen": "`valid_unseen`, 12 turns",
    "unseen-paper": "`valid_unseen`, the paper's 50 turns",
}
"""Heads of the panels where their full titles do not fit: in the README and in pictures."""


def name_arms(plan: Plan) -> dict[str, str]:
    """Return the title of each arm, the cold start first."""
    return {COLD: "cold start"} | {name: arm.title for name, arm in plan.arms.items()}


def list_outcomes(records: Mapping[str, Record], plan: Plan, arm: str, panel: str) -> list[list[float]]:
    """Return won games, [seeds][games], of the finished seeds of an arm; one row for the cold start."""
    names = [COLD] if arm == COLD else [name for name, found, _ in plan.list_runs() if found == arm]
    return [outcomes for name in names if (outcomes := list_outcomes_of(records, name, panel))]


def pair_seeds(records: Mapping[str, Record], plan: Plan, before: str, after: str, panel: str) -> list[list[float]]:
    """Return after - before of each game, [seeds][games], for the seeds that both arms have."""
    steps = []
    for seed in range(plan.seeds):
        runs = [COLD if arm == COLD else f"{arm}-{seed}" for arm in (before, after)]
        first, second = (list_outcomes_of(records, run, panel) for run in runs)
        if first and second:
            steps.append((np.asarray(second) - np.asarray(first)).tolist())
    return steps


def list_outcomes_of(records: Mapping[str, Record], run: str, panel: str) -> list[float]:
    """Return 1 for each game of a panel that a run won and 0 for each other; empty if it was not played."""
    found = records[run].evaluations.get(panel) if run in records else None
    return [] if found is None else [float(game.won) for game in found.games.values()]


def estimate_arm(outcomes: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the success of an arm over seeds and games; of one policy over games alone."""
    return (estimate_crossed(outcomes) if len(outcomes) > 1 else estimate_mean(outcomes[0])).clip()


def make_tables(records: Mapping[str, Record], plan: Plan) -> str:
    """Write the tables of the page as Markdown: success by arm and panel, then differences."""
    titles = name_arms(plan)
    done = {arm: len(list_outcomes(records, plan, arm, plan.primary["panel"])) for arm in titles}
    lines = [f"| won, % | seeds | {' | '.join(str(each['title']) for each in plan.panels.values())} |"]
    lines.append("|---" * (2 + len(plan.panels)) + "|")
    for arm, title in titles.items():
        cells = []
        for panel in plan.panels:
            outcomes = list_outcomes(records, plan, arm, panel)
            cells.append(format_percent(estimate_arm(outcomes)) if outcomes else "–")
        lines.append(f"| {title} | {'–' if arm == COLD else f'{done[arm]} of {plan.seeds}'} | {' | '.join(cells)} |")
    lines += ["", f"| points | {' | '.join(plan.panels)} | by seed, {plan.primary['panel']} |"]
    lines.append("|---" * (2 + len(plan.panels)) + "|")
    before, after = plan.primary["before"], plan.primary["after"]
    for first, second in [*((COLD, arm) for arm in plan.arms), (before, after)]:
        cells, by_seed = [], "–"
        for panel in plan.panels:
            steps = pair_seeds(records, plan, first, second, panel)
            cells.append(_format_difference(steps) if steps else "–")
            if panel == plan.primary["panel"] and steps:
                by_seed = ", ".join(f"{100 * fmean(row):+.1f}" for row in steps)
        lines.append(f"| {titles[second]} − {titles[first]} | {' | '.join(cells)} | {by_seed} |")
    return "\n".join([*lines, "", judge_primary(records, plan)])


def _format_difference(steps: Sequence[Sequence[float]]) -> str:
    if len(steps) < 2:
        return f"{100 * fmean(steps[0]):+.1f}"
    found = estimate_crossed(steps)
    return f"{100 * found.mean:+.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def make_summary(records: Mapping[str, Record], plan: Plan) -> str:
    """Write the README's table as Markdown: success by arm and panel, of an arm its mean and its seeds; the verdict."""
    lines = [f"| unseen games won, % | {' | '.join(SHORT[panel] for panel in plan.panels)} |"]
    lines.append("|---" * (1 + len(plan.panels)) + "|")
    for arm, title in name_arms(plan).items():
        cells = []
        for panel in plan.panels:
            seeds = [100 * fmean(outcomes) for outcomes in list_outcomes(records, plan, arm, panel)]
            listed = f" ({', '.join(f'{seed:.1f}' for seed in seeds)})" if len(seeds) > 1 else ""
            cells.append(f"{fmean(seeds):.1f}{listed}" if seeds else "–")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", judge_primary(records, plan)])


def judge_primary(records: Mapping[str, Record], plan: Plan) -> str:
    """Say in a sentence what the registered comparison found, or how far it is."""
    primary = plan.primary
    steps = pair_seeds(records, plan, primary["before"], primary["after"], primary["panel"])
    names = f"{plan.arms[primary['after']].title} − {plan.arms[primary['before']].title}"
    if len(steps) < plan.seeds:
        return (
            f"The registered comparison, {names}, has {len(steps)} of {plan.seeds} pairs of seeds: no conclusion yet."
        )
    found = estimate_crossed(steps)
    half, (p, _) = 50 * (found.high - found.low), compute_permutation_p([fmean(row) for row in steps])
    verdict = "differs from" if found.low > 0 or found.high < 0 else "does not differ from"
    return (
        f"{names} is {_format_difference(steps)} points over seeds and games,"
        f" ±{half:.1f} (registered: at most ±{primary['half_width']:.0f}); it {verdict} 0. Permuting the signs of the"
        f" {len(steps)} seeds gives p = {p:.2f}."
    )


def make_behaviour(records: Mapping[str, Record], plan: Plan) -> str:
    """Write the table of how the policies play as Markdown: turns, admissible and different commands of a game."""
    lines = ["| panel | policy | turns | admissible | different commands |", "|---|---|---|---|---|"]
    titles = name_arms(plan)
    for panel in plan.panels:
        for arm, title in titles.items():
            names = [COLD] if arm == COLD else [name for name, found, _ in plan.list_runs() if found == arm]
            games = [
                game
                for name in names
                if name in records and panel in records[name].evaluations
                for game in records[name].evaluations[panel].games.values()
            ]
            if games:
                turns = sum(game.turns for game in games)
                cells = (
                    turns / len(games),
                    100 * sum(g.valid for g in games) / turns,
                    fmean(g.distinct for g in games),
                )
                lines.append(f"| {panel} | {title} | {cells[0]:.1f} | {cells[1]:.0f} % | {cells[2]:.1f} |")
    return "\n".join(lines)


def draw_learning(records: Mapping[str, Record], plan: Plan, path: Path) -> None:
    """Draw won training games by step, and each panel before and after."""
    from matplotlib import pyplot

    figure, (curves, panels) = pyplot.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    for number, (arm, described) in enumerate(plan.arms.items()):
        runs = _list_steps(records, plan, arm, "success/all")
        if not runs:
            continue
        mean = 100 * np.nanmean(runs, axis=0)
        curves.plot(range(1, len(mean) + 1), mean, ".", color=COLOURS[number + 1], alpha=0.35, markersize=4)
        curves.plot(range(1, len(mean) + 1), smooth(mean), color=COLOURS[number + 1], label=described.title)
    curves.set(xlabel="step", ylabel="won training games, %", ylim=(0, None))
    curves.xaxis.get_major_locator().set_params(integer=True)
    for number, (arm, title) in enumerate(name_arms(plan).items()):
        for place, panel in enumerate(plan.panels):
            if outcomes := list_outcomes(records, plan, arm, panel):
                _mark_arm(panels, place + 0.2 * (number - 1), outcomes, COLOURS[number], title if place == 0 else None)
    panels.set(ylabel="won unseen games, %", ylim=(0, None), xlim=(-0.5, len(plan.panels) - 0.5))
    heads = [SHORT[panel].replace("`", "").replace(", ", ",\n") for panel in plan.panels]
    panels.set_xticks(range(len(plan.panels)), heads)
    _finish(figure, [curves, panels], path)


def _mark_arm(axes: Axes, place: float, outcomes: Sequence[Sequence[float]], colour: str, label: str | None) -> None:
    """Draw an arm's mean with its interval, which two seeds are too few for, and a point for each seed."""
    found = estimate_arm(outcomes)
    bounds = [[100 * (found.mean - found.low)], [100 * (found.high - found.mean)]] if len(outcomes) != 2 else None
    axes.errorbar([place], [100 * found.mean], bounds, fmt="D", color=colour, capsize=3, label=label)
    if len(outcomes) > 1:
        seeds = [100 * fmean(row) for row in outcomes]
        axes.plot([place + 0.07] * len(seeds), seeds, "o", color=colour, alpha=0.5, markersize=4)


def draw_reasons(records: Mapping[str, Record], plan: Plan, path: Path) -> None:
    """Draw entropy, replay, groups without an advantage, turns and admissible commands by step, for each arm."""
    from matplotlib import pyplot

    shown = [name for name in METRICS if name not in ("success/all", "tokens/written")]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(2.6 * len(shown), 2.6), layout="constrained")
    for axis, name in zip(axes, shown, strict=True):
        for number, (arm, described) in enumerate(plan.arms.items()):
            runs = _list_steps(records, plan, arm, name)
            if runs and not np.isnan(runs).all():
                mean = np.nanmean(np.nan_to_num(runs) if name == "replay/share" else runs, axis=0)
                axis.plot(range(1, len(mean) + 1), mean, color=COLOURS[number + 1], label=described.title)
        axis.set_title(METRICS[name], fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
    _finish(figure, list(axes), path)


def _list_steps(records: Mapping[str, Record], plan: Plan, arm: str, metric: str) -> list[list[float]]:
    runs = [records[name].steps[metric] for name, found, _ in plan.list_runs() if found == arm and name in records]
    return [[np.nan if value is None else value for value in run] for run in runs]


def _finish(figure: Figure, axes: Sequence[Axes], path: Path) -> None:
    for axis in axes:
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in {axes[0], axes[-1]}:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
