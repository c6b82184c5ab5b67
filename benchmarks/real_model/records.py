"""The plan of the comparison and the record of each run: what is committed, and how an edited one is found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import spear_envs
from spear_agents.evaluation.records import EPISODES, read_history, read_last, read_settings
from spear_agents.evaluation.settings import PlayedPanel
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.core import SpearError, canonical_json
from spear_envs.data.files import read_regular, write_text

PLAN = Path(__file__).parent / "plan.yaml"
RECORDS = Path(__file__).parents[1] / "results" / "real_model"
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


def make_evaluation(folder: Path) -> Evaluation:
    """Read a finished ``spear eval --out``.

    Raises:
        SpearError: it was not played on a panel, or a fault cut a game short.
    """
    settings = read_settings(folder)
    played = PlayedPanel.read(settings)
    episodes = read_last(folder / EPISODES)
    faults = [each.task_id for each in episodes if each.stop is StopReason.FAULT]
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


def write_record(record: Record, folder: Path = RECORDS) -> Path:
    """Write a record with its digest, a line for each game.

    Raises:
        SpearError: the file cannot be written.
    """
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
    path = folder / f"{record.run}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        SpearError: it cannot be read, or its digest does not fit.
    """
    try:
        plain = json.loads(read_regular(path))
        evaluations = {
            name: Evaluation(**{**each, "games": {task: Game(*game) for task, game in each["games"].items()}})
            for name, each in plain.pop("evaluations").items()
        }
        record = Record(**plain, evaluations=evaluations)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SpearError(f"{path} is not a record of this benchmark ({type(error).__name__}).") from error
    if digest_record(record) != record.digest:
        raise SpearError(f"{path} was edited: its digest does not fit. Restore it from the repository.")
    return record


def read_records(plan: Plan, folder: Path = RECORDS) -> dict[str, Record]:
    """Read all records of a plan by run.

    Raises:
        SpearError: one was edited, or is of another plan.
    """
    records = {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}
    for name, record in records.items():
        if record.run != name or record.plan != plan.digest:
            raise SpearError(
                f"{folder / name}.json is of run {record.run!r} and plan {record.plan[:12]}, not this one."
            )
    for panel in plan.panels:
        lists = {tuple(record.evaluations[panel].games) for record in records.values() if panel in record.evaluations}
        if len(lists) > 1:
            raise SpearError(f"the records of panel {panel} have different games: play all on one list.")
    return records


def describe_code() -> str:
    """Return the version of the project that plays."""
    return spear_envs.__version__
