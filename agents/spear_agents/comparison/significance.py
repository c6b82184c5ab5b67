"""Whether two evaluations differ by more than chance: paired by task, and over seeds and tasks at once."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from spear_agents.comparison.statistics import (
    ROUNDED,
    ROUNDING,
    Comparison,
    Estimate,
    Metric,
    average_by_task,
    compare_trajectories,
    estimate_difference,
    estimate_mean,
    estimate_with_student,
    plain_estimate,
)
from spear_agents.evaluation.records import EPISODES, read_last, read_settings
from spear_agents.evaluation.run import compare_runs
from spear_agents.evaluation.settings import PlayedPanel
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.data.progress import show_table
from spear_sandbox.console import FilePath, echo
from spear_sandbox.errors import show_entry
from spear_sandbox.terminal import Console

CONFIDENCE = 0.95
POWER = 0.8


def estimate_crossed(values: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of a table [seeds, tasks], with the interval of a two-way random-effects model.

    Seeds and tasks are both random samples: the variance of the mean is that of seeds over their number, of tasks over
    theirs, and of the residual over both. Degrees of freedom are Satterthwaite's, from the mean squares, which gives a
    wide interval if a component is estimated below 0. With one seed the interval is over tasks. Raises ValueError for
    an empty table, or rows of unequal length.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"expected a table of seeds by tasks, got shape {table.shape}")
    seeds, tasks = table.shape
    if seeds == 1 or tasks == 1:
        return estimate_difference(table.mean(0).tolist()) if tasks > 1 else estimate_over_seeds(table[:, 0].tolist())
    mean = float(table.mean())
    by_seed, by_task = table.mean(1) - mean, table.mean(0) - mean
    of_seeds = tasks * float((by_seed**2).sum()) / (seeds - 1)
    of_tasks = seeds * float((by_task**2).sum()) / (tasks - 1)
    rest = table - mean - by_seed[:, None] - by_task[None, :]
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (tasks - 1))
    size = seeds * tasks
    variance = (max(0.0, of_seeds - of_rest) + max(0.0, of_tasks - of_rest) + of_rest) / size
    if variance < ROUNDED:
        return estimate_difference(table.mean(0).tolist())
    squares = of_seeds**2 / (seeds - 1) + of_tasks**2 / (tasks - 1) + of_rest**2 / ((seeds - 1) * (tasks - 1))
    freedom = max(1.0, max(of_seeds + of_tasks - of_rest, 0.0) ** 2 / squares)
    half = _quantile(freedom) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half, tasks)


def estimate_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds with Student's interval, infinite for one or equal values. Raises ValueError."""
    if not values:
        raise ValueError("there are no seeds to average over")
    return estimate_with_student(values, _quantile)


def _quantile(freedom: float) -> float:
    from scipy.stats import t  # late: half a second

    return float(t.ppf(0.5 + CONFIDENCE / 2, freedom))


MOST_PAIRS = 2**20
"""Pairs of runs beyond which another changes nothing."""


def count_pairs(deviation: float, difference: float) -> int | None:
    """Return the number of pairs of runs that detect a true difference with 80 % power in a two-sided t test at 5 %.

    ``deviation`` is that of the difference between the runs of a pair, ``difference`` the true mean difference. None if
    :data:`MOST_PAIRS` do not detect it. Raises ValueError for a difference of 0 or a negative deviation.
    """
    if not difference or deviation < 0:
        raise ValueError(f"a deviation of {deviation} and a difference of {difference}: give >= 0, and not 0")
    from scipy.stats import nct, t

    def detect(pairs: int) -> bool:
        shift = abs(difference) / deviation * math.sqrt(pairs) if deviation else math.inf
        limit = float(t.ppf(0.5 + CONFIDENCE / 2, pairs - 1))
        # scipy has no number far beyond the limit, which is 12.7 at most.
        return shift > 1_000 or bool(nct.sf(limit, pairs - 1, shift) >= POWER)

    enough = 2
    while not detect(enough):
        if enough >= MOST_PAIRS:
            return None
        enough *= 2
    return bisect_left(range(enough), True, lo=max(2, enough // 2), key=detect)


@dataclass(frozen=True)
class CrossedComparison:
    """Pairs of runs, each of one seed, on the same tasks.

    ``difference`` is the mean of after - before, with the interval over seeds and tasks, ``tasks_alone`` the same mean
    with the interval over tasks, which describes these runs only, and ``by_seed`` the mean difference of each pair.
    """

    before: Estimate
    after: Estimate
    difference: Estimate
    tasks_alone: Estimate
    by_seed: tuple[float, ...]
    pairs: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "before": plain_estimate(self.before),
            "after": plain_estimate(self.after),
            "difference": plain_estimate(self.difference),
            "difference_over_tasks_alone": plain_estimate(self.tasks_alone),
            "by_seed": list(self.by_seed),
            "pairs": [pair.to_json() for pair in self.pairs],
        }


def compare_pairs(
    pairs: Sequence[tuple[Iterable[Trajectory], Iterable[Trajectory]]], metric: Metric = Metric.SUCCESS
) -> CrossedComparison:
    """Compare pairs of runs over the tasks that all share. Raises SpearError for no such task, or several task sets."""
    listed = [(list(before), list(after)) for before, after in pairs]
    prints = {trajectory.fingerprint for pair in listed for run in pair for trajectory in run}
    if len(prints) > 1:
        raise SpearError(f"the pairs are on different task sets ({len(prints)} fingerprints): evaluate all on one.")
    averages = [[average_by_task(run, metric) for run in pair] for pair in listed]
    shared = [task for task in averages[0][0] if all(task in run for pair in averages for run in pair)]
    if not shared:
        raise SpearError("the runs share no task: evaluate all of them on the same tasks.")
    before, after = ([[pair[which][task] for task in shared] for pair in averages] for which in (0, 1))
    steps = (np.asarray(after) - np.asarray(before)).tolist()
    return CrossedComparison(
        before=estimate_crossed(before).clip(),
        after=estimate_crossed(after).clip(),
        difference=estimate_crossed(steps),
        tasks_alone=estimate_difference(np.mean(steps, axis=0).tolist()),
        by_seed=tuple(fmean(row) for row in steps),
        pairs=tuple(compare_trajectories(*pair, metric) for pair in listed),
    )


_SHOWN = 0.05
"""Least difference in points that is not shown as 0.0."""
ALPHA = 0.05
RESAMPLES = 10_000
_SAMPLES_AT_MOST = 10_000
"""Largest denominator of a share of won samples."""
_CELLS_AT_MOST = 2_000_000
"""Longest exact distribution; beyond it the permutation test samples."""


@dataclass(frozen=True)
class Judgement:
    """Tests of a comparison.

    ``sign_p`` is of a two-sided exact sign test (gained against lost tasks), ``permutation_p`` of a two-sided paired
    permutation test on the mean difference (signs of the tasks flipped; ``exact`` if all flips were counted).
    ``detectable`` is the smallest true difference that this many tasks detect with 80 % power (None if the tasks do not
    differ), and ``tasks_needed`` the tasks that detect this one (None if it is 0).
    """

    sign_p: float
    permutation_p: float
    exact: bool
    detectable: float | None
    tasks_needed: int | None

    @property
    def significant(self) -> bool:
        """Whether the permutation test rejects chance at 5 %."""
        return self.permutation_p < ALPHA

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return vars(self) | {"significant": self.significant, "alpha": ALPHA, "power": POWER}


def measure_spread(steps: Sequence[float]) -> float:
    """Return the standard deviation of two differences or more; 0 if they differ by rounding alone."""
    spread = stdev(steps)
    return spread if spread**2 > ROUNDED else 0.0


def judge_comparison(comparison: Comparison, seed: int = 0) -> Judgement:
    """Test the paired differences of ``comparison``; ``seed`` is that of drawn permutations."""
    steps = comparison.steps
    permutation_p, exact = compute_permutation_p(steps, seed)
    count = len(steps)
    spread = measure_spread(steps) if count > 1 else None
    factor = NormalDist().inv_cdf(1 - ALPHA / 2) + NormalDist().inv_cdf(POWER)
    mean = fmean(steps)
    needed = None
    if spread is not None and abs(mean) > ROUNDING:
        needed = max(2, math.ceil((factor * spread / mean) ** 2))
    return Judgement(
        sign_p=compute_sign_p(comparison.gained, comparison.lost),
        permutation_p=permutation_p,
        exact=exact,
        detectable=None if not spread else factor * spread / math.sqrt(count),
        tasks_needed=needed,
    )


def compute_sign_p(gained: int, lost: int) -> float:
    """Return the two-sided p of ``gained`` against ``lost`` tasks under Binomial(gained + lost, 1/2), without ties."""
    count = gained + lost
    tail = ways = 1
    for taken in range(1, min(gained, lost) + 1):  # each from the one before: math.comb would take half a minute
        ways = ways * (count - taken + 1) // taken
        tail += ways
    return float(min(Fraction(1), Fraction(2 * tail, 2**count)))


def compute_permutation_p(steps: Sequence[float], seed: int = 0) -> tuple[float, bool]:
    """Return the two-sided p of |sum of steps| when each step's sign is a fair coin, and whether it is exact.

    Shares with a common denominator are counted as integers, and the distribution of their signed sum is built task by
    task. Other values (scores) are flipped 10,000 times, with p = (hits + 1) / (draws + 1).
    """
    sizes = [abs(step) for step in steps if step]
    if not sizes:
        return 1.0, True
    units = _count_units(sizes)
    if units is not None:
        total = sum(units)
        chances = np.zeros(2 * total + 1)
        chances[total] = 1.0
        for unit in units:
            chances = (np.roll(chances, unit) + np.roll(chances, -unit)) / 2
        seen = abs(sum(unit if step > 0 else -unit for unit, step in zip(units, filter(None, steps), strict=True)))
        sums = np.abs(np.arange(-total, total + 1))
        return float(min(1.0, chances[sums >= seen].sum())), True
    dice = np.random.default_rng(seed)
    values = np.array(sizes)
    observed = abs(sum(steps))
    hits = 0
    for _ in range(RESAMPLES // 100):
        signs = dice.integers(0, 2, (100, len(values))) * 2 - 1
        hits += int((np.abs(signs @ values) >= observed - 1e-12).sum())
    return (hits + 1) / (RESAMPLES + 1), False


def adjust_p(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by Holm's method, which bounds the chance of any false finding."""
    adjusted, most = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        most = max(most, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = most
    return adjusted


def _count_units(sizes: Sequence[float]) -> list[int] | None:
    """Return the sizes as multiples of a common unit; None if there is none or the distribution would be too long."""
    shares = [Fraction(size).limit_denominator(_SAMPLES_AT_MOST) for size in sizes]
    if any(abs(float(share) - size) > 1e-12 for share, size in zip(shares, sizes, strict=True)):
        return None
    unit = math.lcm(*(share.denominator for share in shares))
    units = [int(share * unit) for share in shares]
    return units if sum(units) * len(units) <= 50 * _CELLS_AT_MOST and sum(units) <= _CELLS_AT_MOST else None


def _to_points(share: float) -> float:
    """Return a difference of shares in points, 0.0 where only the rounding of floats makes it another number."""
    return round(100 * share, 9) + 0.0  # -0.0 becomes 0.0


def explain_comparison(comparison: Comparison, judgement: Judgement, before: str, after: str) -> list[str]:
    """Explain the figures in sentences."""
    points = _to_points(comparison.difference.mean)
    count = len(comparison.steps)
    p = f"p = {judgement.permutation_p:.2g}"
    sentences = []
    if not any(comparison.steps):
        sentences.append(f"The two runs did equally well on each of the {count} tasks.")
    elif judgement.significant:
        better, worse = (after, before) if points > 0 else (before, after)
        sentences.append(
            f"{better} is better than {worse} by {abs(points):.1f} points ({p}): so large a difference would seldom "
            "be chance."
        )
    else:
        sentences.append(
            f"No difference is shown: {points:+.1f} points ({p}) may well be chance. This does not prove that the two "
            "are equal."
        )
    if judgement.detectable is not None:
        sentences.append(
            f"These {count} tasks show a true difference of {100 * judgement.detectable:.1f} points 4 times in 5."
        )
    if not judgement.significant and judgement.tasks_needed is not None and abs(points) >= _SHOWN:
        sentences.append(
            f"To show a true difference of {abs(points):.1f} points that often, about {judgement.tasks_needed:,} tasks "
            "would be needed."
        )
    if comparison.unshared:
        sentences.append(f"{comparison.unshared} tasks were left out, because only one of the runs played them.")
    return sentences


def explain_panels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say that runs were not all played on the same panel, if so, with the panels."""
    played = [PlayedPanel.read(each) for each in settings]
    names = dict.fromkeys("none" if each is None else each.label for each in played)
    return [f"These are not results of one panel: {'; '.join(names)}."] if len(names) > 1 else []


_UNCHANGING = ("model_digest", "fingerprint", "tokenizer")


@click.command()
@click.argument("runs", metavar="A B [C ...]", nargs=-1, required=True, type=FilePath())
@click.option(
    "--pair",
    "more",
    nargs=2,
    multiple=True,
    metavar="A2 B2",
    type=FilePath(),
    help="One more pair, of runs of another training seed; may be repeated.",
)
@click.option("--metric", type=click.Choice([metric.value for metric in Metric]), default="success")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of drawn permutations.")
@click.option("--json", "as_json", is_flag=True, help="Figures for programs.")
def compare(runs: Sequence[Path], more: Sequence[tuple[Path, Path]], metric: str, seed: int, as_json: bool) -> None:
    """Compare folders of `spear eval --out`, task by task.

    All must be on the same task set (their fingerprints are compared). Of more than two, each is compared with the
    first, and p values are corrected for their number (Holm). Exit code 0 whether they differ or not.

    An interval over tasks describes these runs only. To compare two ways of training, give the runs of several
    seeds (--pair): the interval over seeds and tasks covers runs of other seeds.

    \b
      spear compare runs/before runs/after
      spear compare runs/base runs/react runs/reflexion
      spear compare runs/grpo-0 runs/spear-0 --pair runs/grpo-1 runs/spear-1
    """
    if len(runs) < 2 or (more and len(runs) > 2):
        raise click.UsageError(f"{len(runs)} runs: give two or more, or exactly two with --pair")
    for given in (runs, *more):
        if twice := next((run for at, run in enumerate(given) if run.resolve() in map(Path.resolve, given[:at])), None):
            raise click.UsageError(f"{twice} is given twice: each run must be another folder")
    if more:
        _compare_seeds([(runs[0], runs[1]), *more], Metric(metric), as_json)
        return
    if len(runs) > 2:
        _compare_many(runs, Metric(metric), seed, as_json)
        return
    before, after = runs
    comparison = compare_runs(before, after, Metric(metric))
    judgement = judge_comparison(comparison, seed)
    settings = read_settings(before), read_settings(after)
    changes = list_changes(*settings)
    names = name_runs(before, after)
    sentences = explain_comparison(comparison, judgement, *names) + explain_panels(settings)
    if as_json:
        found = comparison.to_json() | {"metric": metric, "settings": changes, "sentences": sentences}
        echo(json.dumps(found | {"judgement": judgement.to_json()}, indent=2))
        return
    console = Console()
    show_table(console, make_table(comparison, judgement, names, Metric(metric)))
    for key, (old, new) in changes.items():
        console.print(f"{key}: {old!r} -> {new!r}", soft_wrap=True)
    for sentence in sentences:
        console.print(show_entry(sentence), soft_wrap=True)


def _compare_many(folders: Sequence[Path], metric: Metric, seed: int, as_json: bool) -> None:
    """Compare each run with the first."""
    names = name_runs(*folders)
    base, *others = (read_last(folder / EPISODES) for folder in folders)
    found = []
    for name, run in zip(names[1:], others, strict=True):
        try:
            found.append(compare_trajectories(base, run, metric))
        except SpearError as error:
            raise SpearError(f"{names[0]} and {name}: {error}") from error
    judged = [judge_comparison(each, seed) for each in found]
    adjusted = adjust_p([each.permutation_p for each in judged])
    sentences = explain_many(names, found, adjusted) + explain_panels([read_settings(folder) for folder in folders])
    if as_json:
        compared = [
            {"name": name, **each.to_json(), "judgement": judgement.to_json(), "adjusted_p": p}
            for name, each, judgement, p in zip(names[1:], found, judged, adjusted, strict=True)
        ]
        shown = {"metric": metric.value, "first": names[0], "compared": compared, "sentences": sentences}
        echo(json.dumps(shown, indent=2))
        return
    table = Table(title=f"{metric.value}, {len(average_by_task(base, metric))} tasks", box=SIMPLE_HEAD)
    table.add_column("")
    for heading in ("mean", "CI95", f"against {names[0]}", "CI95", "p, Holm"):
        table.add_column(heading, justify="right")
    table.add_row(names[0], *_figures(estimate_mean(list(average_by_task(base, metric).values()))), "", "", "")
    for name, each, p in zip(names[1:], found, adjusted, strict=True):
        table.add_row(name, *_figures(each.after), *_figures(each.difference, "+"), f"{p:.2g}")
    console = Console()
    show_table(console, table)
    for sentence in sentences:
        console.print(show_entry(sentence), soft_wrap=True)


def explain_many(names: Sequence[str], found: Sequence[Comparison], adjusted: Sequence[float]) -> list[str]:
    """Explain the differences of several runs from the first of ``names``, with their corrected p values."""
    sentences = []
    groups: dict[str, list[str]] = {"better than": [], "worse than": [], "not shown to differ from": []}
    for name, each, p in zip(names[1:], found, adjusted, strict=True):
        verdict = (
            "not shown to differ from" if p >= ALPHA else "better than" if each.difference.mean > 0 else "worse than"
        )
        groups[verdict].append(name)
    for verdict, members in groups.items():
        if members:
            sentences.append(f"{', '.join(members)}: {verdict} {names[0]}.")
    left = [f"{each.unshared} with {name}" for name, each in zip(names[1:], found, strict=True) if each.unshared]
    if left:
        sentences.append(
            f"Tasks that only one of the two runs played were left out: {', '.join(left)}. There the difference is not "
            "that of the two means."
        )
    return sentences


def _compare_seeds(folders: Sequence[tuple[Path, Path]], metric: Metric, as_json: bool) -> None:
    """Compare several pairs of runs, over seeds and tasks. Raises SpearError if a pair is given twice, or its copy."""
    made = [tuple(map(_identify_policy, pair)) for pair in folders]
    if len(set(made)) < len(folders):
        raise SpearError("a pair is given twice: each must be of another training seed")
    runs = [(read_last(first / EPISODES), read_last(second / EPISODES)) for first, second in folders]
    found = compare_pairs(runs, metric)
    sentences = explain_pairs(found) + explain_panels([read_settings(folder) for pair in folders for folder in pair])
    if as_json:
        echo(json.dumps(found.to_json() | {"metric": metric.value, "sentences": sentences}, indent=2))
        return
    table = Table(
        title=f"{metric.value}, {len(folders)} seeds × {found.difference.tasks} tasks",
        box=SIMPLE_HEAD,
        pad_edge=False,
        min_width=60,
    )
    for column in ("", "mean", "CI95"):
        table.add_column(column, justify="right" if column else "left")
    names = name_runs(*folders[0])
    for name, estimate in zip(names, (found.before, found.after), strict=True):
        table.add_row(f"{name} …", *_figures(estimate))
    table.add_section()
    table.add_row("difference", *_figures(found.difference, "+"))
    table.add_row("over these runs' tasks alone", *_figures(found.tasks_alone, "+"))
    table.add_row("seed by seed", ", ".join(f"{100 * step:+.1f}" for step in found.by_seed), "")
    console = Console()
    show_table(console, table)
    for sentence in sentences:
        console.print(show_entry(sentence), soft_wrap=True)


def _identify_policy(run: Path) -> tuple[Any, ...]:
    """Return the digests of a run's weights and adapter, or its folder if it has none."""
    settings = read_settings(run)
    digests = settings.get("model_digest"), settings.get("lora_digest")
    return digests if any(digests) else (str(run.resolve()),)


def explain_pairs(found: CrossedComparison) -> list[str]:
    """Explain the figures of several pairs in sentences."""
    difference, points = found.difference, _to_points(found.difference.mean)
    if difference.low > 0 or difference.high < 0:
        better = "The second" if points > 0 else "The first"
        text = f"{better} way of training is better by {abs(points):.1f} points, over seeds and tasks."
    else:
        text = f"No difference between the two ways of training is shown: {points:+.1f} points may well be chance."
        if found.tasks_alone.low > 0 or found.tasks_alone.high < 0:
            text += " The interval over tasks alone leaves 0 out, but it describes these runs only."
    sentences = [text]
    if any(pair.unshared or len(pair.steps) > found.tasks_alone.tasks for pair in found.pairs):
        sentences.append("Tasks that not every run played were left out.")
    deviation = measure_spread(found.by_seed)
    if deviation and abs(points) >= _SHOWN:
        pairs = count_pairs(deviation, difference.mean)
        sentences.append(
            f"The pairs deviate by {100 * deviation:.1f} points; to show a true difference of {abs(points):.1f} points"
            f" 4 times in 5, {f'about {pairs:,}' if pairs else f'more than {MOST_PAIRS:,}'} pairs would be needed."
        )
    return sentences


def name_runs(*folders: Path) -> tuple[str, ...]:
    """Return short, different names of folders: the last part of their paths if it suffices."""
    short = tuple(folder.resolve().name for folder in folders)
    return short if len(set(short)) == len(short) else tuple(map(str, folders))


def list_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two evaluations differ; of a panel its name and digest."""
    old, new = (each | {"panel": found and found.label} for each in (old, new) for found in [PlayedPanel.read(each)])
    keys = [key for key in {**old, **new} if key not in _UNCHANGING]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def make_table(comparison: Comparison, judgement: Judgement, names: Sequence[str], metric: Metric) -> Table:
    """Make a table of both runs, their paired difference and the tests."""
    table = Table(title=f"{metric.value}, {len(comparison.steps)} tasks", box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("CI95", justify="right")
    for name, estimate in zip(names, (comparison.before, comparison.after), strict=True):
        table.add_row(name, *_figures(estimate))
    table.add_section()
    table.add_row("difference", *_figures(comparison.difference, "+"))
    table.add_row("tasks better / worse", f"{comparison.gained} / {comparison.lost}", "")
    table.add_row("sign test, exact", f"p = {judgement.sign_p:.2g}", "")
    kind = "exact" if judgement.exact else "drawn"
    table.add_row(f"permutation test, {kind}", f"p = {judgement.permutation_p:.2g}", "")
    return table


def _figures(estimate: Estimate, sign: str = "") -> tuple[str, str]:
    return f"{_to_points(estimate.mean):{sign}.1f}", _interval(estimate.low, estimate.high, sign)


def _interval(low: float, high: float, sign: str) -> str:
    return f"[{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
