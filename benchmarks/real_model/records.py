"""The plan of the comparison and the record of each run: what is committed, and how an edited one is found."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import spear_envs
from spear_agents.evaluation.panels import read_panel
from spear_agents.evaluation.records import EPISODES, read_history, read_last, read_settings
from spear_agents.evaluation.settings import PlayedPanel
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.core import SpearError, canonical_json
from spear_envs.data.files import read_regular, write_text

PLAN = Path(__file__).parent / "plan.yaml"
RECORDS = Path(__file__).parents[1] / "results" / "real_model"
PANELS = Path(__file__).parents[2] / "panels"
"""Manifests of the panels, with every game."""
COLD = "cold-start"
"""The run that is only evaluated."""
METRICS = {
    "success/all": "won training games",
    "entropy/token-mean": "entropy, nats a token",
    "replay/share": "replayed rows of an update",
    "groups/equal": "groups without an advantage",
    "turns/mean": "turns of a game",
    "turns/valid_action": "admissible commands",
    "tokens/written": "tokens written",
}
"""Metrics of a training that a record keeps for each step, and their titles."""


@dataclass(frozen=True)
class Arm:
    """A way of training."""

    title: str
    keys: Sequence[str]


@dataclass(frozen=True)
class Plan:
    """What was registered, see ``plan.yaml``."""

    model: str
    cold_start: Mapping[str, Any]
    """Words of the two commands that made it, and the SHA-256 of its adapter."""
    training: Sequence[str]
    arms: Mapping[str, Arm]
    seeds: int
    primary: Mapping[str, Any]
    panels: Mapping[str, Mapping[str, Any]]
    digest: str
    """SHA-256 of the file."""

    def list_runs(self) -> Iterator[tuple[str, str, int]]:
        """Yield name, arm and seed of every training, in the order in which they are run."""
        for seed in range(self.seeds):
            for arm in self.arms:
                yield f"{arm}-{seed}", arm, seed

    def find_runs(self) -> dict[str, tuple[str, int]]:
        """Return arm and seed of every run by name, those of the cold start first."""
        return {COLD: (COLD, 0)} | {name: (arm, seed) for name, arm, seed in self.list_runs()}


def read_plan(path: Path = PLAN) -> Plan:
    """Read the registered plan."""
    text = path.read_bytes()
    plain = yaml.safe_load(text)
    arms = {name: Arm(**values) for name, values in plain.pop("arms").items()}
    return Plan(**plain, arms=arms, digest=hashlib.sha256(text).hexdigest())


class Game(NamedTuple):
    """How one game of a panel ended."""

    won: int
    turns: int
    valid: int
    """Turns whose command had an effect."""
    distinct: int
    """Different commands."""


@dataclass(frozen=True)
class Evaluation:
    """A policy on a panel."""

    panel: str
    panel_digest: str
    fingerprint: str
    games: Mapping[str, Game]
    """By task id."""


@dataclass(frozen=True)
class Record:
    """A training and its evaluations; the cold start has no training."""

    run: str
    arm: str
    seed: int
    plan: str
    """SHA-256 of the plan."""
    code: str
    processor: str
    model_digest: str
    steps: Mapping[str, Sequence[float | None]]
    """Of each of :data:`METRICS` the value at each step."""
    evaluations: Mapping[str, Evaluation]
    digest: str = ""
    """SHA-256 of everything else, see :func:`digest_record`."""


def digest_record(record: Record) -> str:
    """Compute the SHA-256 of a record without its digest, as canonical JSON."""
    plain = {name: value for name, value in asdict(record).items() if name != "digest"}
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()


def list_faults(episodes: Sequence[Trajectory]) -> list[str]:
    """List the tasks of episodes that a fault cut short."""
    return [each.task_id for each in episodes if each.stop is StopReason.FAULT]


def make_evaluation(folder: Path, model_digest: str) -> Evaluation:
    """Read a finished ``spear eval --out`` of the model with this digest.

    Raises:
        SpearError: it is of another model, was not played on a panel, or a fault cut a game short.
    """
    settings = read_settings(folder)
    if settings.get("model_digest") != model_digest:
        raise SpearError(f"{folder} was played by another model than the one beside it: remove it, to play again.")
    played = PlayedPanel.read(settings)
    episodes = read_last(folder / EPISODES)
    faults = list_faults(episodes)
    if played is None or faults:
        raise SpearError(f"{folder} {f'has faults, the first in {faults[0]}' if faults else 'was played on no panel'}")
    games = {each.task_id: _describe_game(each) for each in sorted(episodes, key=lambda each: each.task_id)}
    return Evaluation(played.name, played.digest, episodes[0].fingerprint, games)


def _describe_game(episode: Trajectory) -> Game:
    valid = sum(turn.action_ok for turn in episode.turns)
    return Game(int(episode.won), len(episode.turns), valid, len({turn.action for turn in episode.turns}))


def read_steps(run: Path) -> dict[str, list[float | None]]:
    """Read the kept metrics of a training, step by step."""
    records = [record for record in read_history(run) if "success/all" in record]
    return {name: [_round(record.get(name)) for record in records] for name in METRICS}


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def format_record(record: Record) -> str:
    """Write a record with its digest as JSON, a line for each game. Raises ValueError for values that JSON lacks."""
    plain = asdict(record) | {"digest": digest_record(record)}
    evaluations = plain.pop("evaluations")
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in plain.items()]
    parts = []
    for name, each in evaluations.items():
        games = ",\n".join(
            f"        {json.dumps(task)}: {json.dumps(game)}" for task, game in each.pop("games").items()
        )
        head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in each.items())
        parts.append(f'    {json.dumps(name)}: {{{head}, "games": {{\n{games}\n    }}}}')
    lines.append('  "evaluations": {\n' + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_record(record: Record, folder: Path = RECORDS) -> Path:
    """Write a record as :func:`format_record` does.

    Raises:
        SpearError: the file cannot be written.
    """
    path = folder / f"{record.run}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, format_record(record))
    return path


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        SpearError: it cannot be read, or is not what :func:`format_record` writes, its digest included.
    """
    try:
        text = read_regular(path).decode("utf-8")
        plain = json.loads(text)
        evaluations = {
            name: Evaluation(**{**each, "games": {task: Game(*game) for task, game in each["games"].items()}})
            for name, each in plain.pop("evaluations").items()
        }
        record = Record(**plain, evaluations=evaluations)
        written = format_record(record)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise SpearError(f"{path} is not a record of this benchmark ({type(error).__name__}).") from error
    if written != text:  # also two values of one name, of which readers see the last
        raise SpearError(f"{path} was edited: its text or digest does not fit. Restore it from the repository.")
    return record


def read_records(plan: Plan, folder: Path = RECORDS) -> dict[str, Record]:
    """Read all records of a plan by run.

    Raises:
        SpearError: one was edited, is of another plan, run or panel, lacks a game, or two are of one model.
    """
    records = {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}
    runs, manifests = plan.find_runs(), _read_manifests(plan)
    for name, record in records.items():
        if runs.get(name) != (record.arm, record.seed) or (record.run, record.plan) != (name, plan.digest):
            raise SpearError(
                f"{folder / name}.json is of run {record.run!r}, arm {record.arm!r}, seed {record.seed!r} and plan"
                f" {record.plan!s:.12}: the plan {plan.digest:.12} has no such run of this name."
            )
        if fault := _find_fault(manifests, record):
            raise SpearError(f"{folder / name}.json {fault}: it is not a run of this plan.")
    models = Counter(record.model_digest for record in records.values())
    twice = [name for name, record in records.items() if models[record.model_digest] > 1]
    if twice:
        raise SpearError(f"the records {', '.join(twice)} are of one model: each training makes its own.")
    for panel in plan.panels:
        played = {(each.panel, each.panel_digest[:12]) for each in (one.evaluations[panel] for one in records.values())}
        if len(played) > 1:
            raise SpearError(f"the records in {folder} were played on several panels {panel}, {sorted(played)}.")
    if len({len(values) for record in records.values() for values in record.steps.values()}) > 1:
        raise SpearError(f"the trainings in {folder} have different numbers of steps: the plan has one.")
    return records


def _read_manifests(plan: Plan) -> dict[str, dict[str, Any]]:
    """Read what ``panels/`` says of each panel of the plan."""
    options = {name: panel["options"] for name, panel in plan.panels.items()}
    return {
        name: read_panel(PANELS / f"{words[words.index('--panel') + 1]}.json")[1] for name, words in options.items()
    }


def _find_fault(manifests: Mapping[str, Mapping[str, Any]], record: Record) -> str | None:
    """Return what a record lacks or has too much; None for a whole one."""
    if record.steps.keys() != (set() if record.arm == COLD else METRICS.keys()):
        return f"has the metrics {', '.join(record.steps) or 'of no step'}"
    if record.evaluations.keys() != manifests.keys():
        return f"has the panels {', '.join(record.evaluations)} instead of {', '.join(manifests)}"
    for name, found in record.evaluations.items():
        written, panel = manifests[name], manifests[name]["name"]
        if found.panel.partition(" with ")[0] != panel or found.fingerprint != written["fingerprint"]:
            return f"was played on the panel {found.panel!r} where the plan has {panel}"
        if found.panel == panel and found.panel_digest != written["digest"]:
            return f"was played on another panel {panel} ({found.panel_digest[:12]}) than panels/{panel}.json"
        if list(found.games) != [task["id"] for task in written["tasks"]]:
            return f"has other games of the panel {name} than {panel}.json, or in another order"
        for task, (won, turns, valid, distinct) in found.games.items():
            if won not in (0, 1) or not (0 <= valid <= turns and 0 <= distinct <= turns):
                return f"has impossible numbers for {task}"
    return None


def describe_code() -> str:
    """Return the version of the project that plays."""
    return spear_envs.__version__
