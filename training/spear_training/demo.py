"""``spear demo``: a complete training on a CPU, without a download."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from spear_agents.comparison.statistics import Comparison, Estimate
from spear_agents.evaluation.records import EPISODES, read_history
from spear_agents.evaluation.run import SUMMARY, compare_runs, play_baseline, run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.models import digest_model
from spear_agents.play.trajectory import Layout, Trajectory, read_trajectories
from spear_agents.viewer.gif import render_episode_gif
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.data.files import write_json, write_text
from spear_envs.data.progress import show_table
from spear_sandbox.terminal import Console, Progress
from spear_training.run.compose import quote_value
from spear_training.run.training import make_policy, run_training

ENV_ID = "spear/Sokoban-v1"
ENV_KEYWORDS: dict[str, Any] = {"modality": "text"}
TEMPERATURES = (1.0, 0.4)
"""The first is that of the result; the second is the paper's."""
RESULTS = "results.json"
SIZE = "size.txt"


@dataclass(frozen=True)
class DemoSize:
    """How much of everything a demo does."""

    name: str
    steps: int
    """Training steps, unless the caller says otherwise."""
    warm_start: dict[str, Any]
    """Options of ``spear warmstart`` that differ from the recipe of the environment."""
    training: tuple[str, ...]
    """Words after those of ``preset=demo``."""
    tasks: str
    """Levels of the test panel."""
    samples: int
    """Episodes of each."""


ROLLOUTS = ("rollout.correction.bypass_mode=true", "rollout.temperature=0.7")
"""There is one update a batch, so that the log-probs of the rollout are those of the old policy, and one pass less. A
cooler rollout leaves the policy less certain, which then repeats itself less at 0.4."""
FULL = DemoSize("full", 60, {}, ROLLOUTS, "all", 4)
"""The schedules of the preset are made for its 60 steps."""
QUICK = DemoSize("quick", 4, {"episodes": 800, "panel_tasks": 0}, ("validation.tasks=32", *ROLLOUTS), "48", 2)
"""Shows that everything runs. It is too short to learn anything."""


def run_demo(out: Path, *, seed: int, console: Console, size: DemoSize = FULL, steps: int | None = None) -> None:
    """Run the warm start, evaluate, train, evaluate again and draw; stages with existing results in ``out`` are
    skipped.

    Raises SpearError for any error that the user can fix, such as results of another ``size`` in ``out``.
    """
    start = time.monotonic()
    steps = steps or size.steps
    policy = out / "warmstart"
    _require_size(out, size)
    _announce(console, 1, "warm start: a small policy from a noisy expert", policy)
    if not (policy / "config.json").is_file():
        from spear_training.warmstart import choose_recipe

        make_policy(replace(choose_recipe(ENV_ID), **size.warm_start), policy, console)
    _announce(console, 2, "evaluation of the warm start on the test panel", out / "eval")
    _evaluate(out, "before", policy, size, console)

    _announce(console, 3, f"SPEAR training, {steps} steps", out / "train")
    words = ("preset=demo", f"model.path={quote_value(str(policy))}", f"train.steps={steps}", f"seed={seed}")
    run_training((*words, *size.training), out / "train", console)
    trained = out / "train" / "checkpoints" / f"global_step_{steps}" / "actor" / "huggingface"

    if not trained.is_dir():
        raise SpearError(f"{out} has been trained for more than {steps} steps: ask for more --steps")

    _announce(console, 4, "evaluation of the trained policy on the same panel", out / "eval")
    after = f"after-{steps}-steps"  # a longer training keeps the evaluation of a shorter one
    _evaluate(out, after, trained, size, console)

    _announce(console, 5, "pictures and the table", out)
    comparisons = {
        temperature: compare_runs(_folder(out, "before", temperature), _folder(out, after, temperature))
        for temperature in TEMPERATURES
    }
    with Progress(TextColumn("    {task.description}"), console=console, announces=True) as progress:
        progress.add_task("random and expert play", total=None)
        results = _collect_results(out, after, steps, size, comparisons)
    gif = _draw_episode(out, after)
    (out / "curves.png").write_bytes((out / "train" / "curves.png").read_bytes())
    _show(out, results, comparisons, gif, time.monotonic() - start, console)


def _announce(console: Console, number: int, what: str, where: Path) -> None:
    console.print(Text.assemble((f"{number}/5", "bold"), f" {what} ", (f"({where})", "dim")))


def _require_size(out: Path, size: DemoSize) -> None:
    """Note the size of the demo in ``out``. Raises SpearError if it has another."""
    path = out / SIZE
    if path.is_file() and (earlier := path.read_text(encoding="utf-8").strip()) != size.name:
        raise SpearError(f"{out} holds the {earlier} demo, not the {size.name} one: name another --out")
    write_text(path, f"{size.name}\n")


def _settings(model: Path, temperature: float, size: DemoSize) -> EvalSettings:
    return EvalSettings(
        ENV_ID,
        model=str(model),
        env_kwargs=ENV_KEYWORDS,
        split="test",
        tasks=size.tasks,
        episodes_per_task=size.samples,
        temperature=temperature,
        template="compact",
        history=0,
        layout=Layout.PER_TURN,
    )


def _folder(out: Path, name: str, temperature: float) -> Path:
    return out / "eval" / f"{name}-temperature-{temperature:g}"


def _evaluate(out: Path, name: str, model: Path, size: DemoSize, console: Console) -> None:
    """Play the test panel at both temperatures, resumably.

    Raises SpearError if the folder holds the episodes of another policy, such as one of a training since deleted.
    """
    columns = (TextColumn("    {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, announces=True) as progress:
        for temperature in TEMPERATURES:
            folder = _folder(out, name, temperature)
            if _is_evaluated(folder, model):
                continue
            task = progress.add_task(f"temperature {temperature:g}", total=None)

            def observe(done: int, total: int, trajectory: Trajectory | None, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            run_evaluation(_settings(model, temperature, size), folder, deterministic=True, observer=observe)


def _is_evaluated(folder: Path, model: Path) -> bool:
    """Return whether an evaluation is complete and of these weights."""
    path = folder / SUMMARY
    if not path.is_file():
        return False
    played = json.loads(path.read_text(encoding="utf-8")).get("model_digest")
    return played is None or played == digest_model(model)


def _collect_results(
    out: Path, after: str, steps: int, size: DemoSize, comparisons: dict[float, Comparison]
) -> dict[str, Any]:
    """Add the baselines, played once, and the subtasks to the comparisons; write ``results.json`` and ``.md``."""
    path = out / RESULTS
    baselines = (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}).get("baselines")
    if baselines is None:
        settings = replace(_settings(out, TEMPERATURES[0], size), model=None, engine=EngineKind.RANDOM)
        kinds = (EngineKind.RANDOM, EngineKind.EXPERT)
        baselines = {kind.value: play_baseline(settings, kind).to_json() for kind in kinds}
    parts = {
        name: json.loads((_folder(out, folder, TEMPERATURES[0]) / SUMMARY).read_text(encoding="utf-8"))
        for name, folder in (("before", "before"), ("after", after))
    }
    seconds = [step["perf/step_seconds"] for step in read_history(out / "train") if "perf/step_seconds" in step]
    results = {
        "environment": ENV_ID,
        "split": "test",
        "fingerprint": parts["before"]["fingerprint"],
        "size": size.name,
        "samples_per_task": size.samples,
        "steps": steps,
        "comparison": {f"{temperature:g}": part.to_json() for temperature, part in comparisons.items()},
        "subtasks": {
            subtask: {name: part["subtasks"][subtask]["success"] for name, part in parts.items()}
            for subtask in parts["before"]["subtasks"]
        },
        "baselines": baselines,
        "step_seconds_median": round(median_high(seconds), 2),
    }
    write_json(path, results)
    write_text(out / "results.md", _write_table(results, comparisons))
    return results


def _name(results: dict[str, Any]) -> str:
    if results["size"] == QUICK.name:
        return f"short demo of {results['steps']} steps (--quick: it shows that everything runs, not that it learns)"
    return f"demo of {results['steps']} steps"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.mean:.1%} [{estimate.low:.0%}, {estimate.high:.0%}]"


def _rows(results: dict[str, Any], comparisons: dict[float, Comparison]) -> list[tuple[str, str, str, str]]:
    """Return the rows of the result table: what, before, after, paired difference."""
    rows = []
    for temperature, part in comparisons.items():
        difference = part.difference
        points = [100 * value for value in (difference.mean, difference.low, difference.high)]
        change = "{:+.1f} [{:+.0f}, {:+.0f}]".format(*points)
        rows.append((f"all, T={temperature:g}", _percent(part.before), _percent(part.after), change))
    for subtask, part in results["subtasks"].items():
        before, after = part["before"]["mean"], part["after"]["mean"]
        tasks = part["before"]["tasks"]
        rows.append((f"{subtask} ({tasks})", f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f}"))
    for name, part in results["baselines"].items():
        rows.append((f"{name} play", f"{part['success']['mean']:.1%}", "", ""))
    return rows


HEAD = ("success", "warm start", "after SPEAR", "points")
LEGEND = (
    "T: sampling temperature (1 where not said); len: bands of optimal length (levels); [95 % interval over levels]"
)


def _write_table(results: dict[str, Any], comparisons: dict[float, Comparison]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(results, comparisons)]
    lines += [
        "",
        f"{_name(results)}: {results['environment']}, {results['split']} split, "
        f"{results['baselines']['random']['success']['tasks']} levels × {results['samples_per_task']} samples, "
        f"task fingerprint `{results['fingerprint'][:16]}`, {results['steps']} training steps of "
        f"{results['step_seconds_median']} s (median). {LEGEND}; differences are paired by level.",
    ]
    return "\n".join(lines) + "\n"


def _draw_episode(out: Path, after: str) -> Path:
    """Draw the longest level that the trained policy solved in the fewest possible moves, or nearly."""
    path = out / "episode.gif"
    episodes = list(read_trajectories(_folder(out, after, TEMPERATURES[0]) / EPISODES))
    env: Any = make_env(ENV_ID, "test", ENV_KEYWORDS)
    optimal = {}
    for task in env.tasks:
        env.reset(options={"task": task.id})
        optimal[task.id] = len(env.expert_plan())
    env.close()

    def rank(episode: Trajectory) -> tuple[bool, bool, int]:
        best = optimal[episode.task_id]
        return episode.won, len(episode.turns) == best, best

    render_episode_gif(ENV_ID, ENV_KEYWORDS, max(episodes, key=rank), path)
    return path


def _show(
    out: Path,
    results: dict[str, Any],
    comparisons: dict[float, Comparison],
    gif: Path,
    seconds: float,
    console: Console,
) -> None:
    table = Table(*HEAD, title=f"Sokoban test panel: {_name(results)}", caption=LEGEND)
    for row in _rows(results, comparisons):
        table.add_row(*row)
    show_table(console, table)
    console.print(
        f"median step {results['step_seconds_median']} s; this call took {seconds / 60:.1f} minutes; done. Look at:"
    )
    for path, what in (
        (out / "curves.png", "learning curves"),
        (gif, "a level the trained policy played"),
        (out / "results.md", "the table above"),
        (out / "eval", "all episodes of all evaluations, as JSON lines"),
        (out / "train" / "tensorboard", "tensorboard --logdir this"),
    ):
        console.print(Text.assemble(f"  {path}  ", (what, "dim")))
    console.print(f"Next: spear view {out} shows every episode and the curves in the browser.", soft_wrap=True)
