"""A ledger of results: one file per run, with the data of its figures."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import spear_envs
from spear_agents.comparison.statistics import Estimate, estimate_outcomes, format_percent, plain_estimate
from spear_agents.evaluation.panels import OFFICIAL, Panel, open_panel, write_panel
from spear_agents.evaluation.records import EPISODES, read_last, read_settings
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings, PlayedPanel
from spear_agents.models import digest_model
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.core import SpearError, canonical_json
from spear_envs.data.files import explain_unwritable, put_folder, read_regular, write_text

DECIDED = (
    *("env_id", "split", "env_kwargs", "temperature", "top_p", "top_k", "max_tokens", "max_prompt_tokens"),
    *("max_row_tokens", "overlong", "template", "layout", "history", "seed", "method", "trials", "agent"),
    "native_tools",
)
"""Settings of a run fixed by its panel, besides tasks and samples, which its episodes show."""
SCRIPTED = (EngineKind.EXPERT.value, EngineKind.RANDOM.value, EngineKind.SCRIPT.value)
POLICIES = "policies"
"""Folder of the published models in a ledger."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class Entry:
    """One run on one panel."""

    name: str
    panel: str
    panel_digest: str
    """Digest of the panel with its tasks and protocol, see ``spear panel export``."""
    fingerprint: str
    """Fingerprint of the task set."""
    engine: str
    model: str | None
    """Name of the model; None for a scripted player."""
    model_digest: str | None
    """Digest of its weights, if they were available."""
    code: str
    """Version that played it."""
    command: str
    """Command that plays it again."""
    outcomes: Mapping[str, Sequence[float]]
    """By task 1 or 0 for each sample, in order of seeds."""
    scores: Mapping[str, float]
    """By task the benchmark's own score, the mean over samples."""
    digest: str
    """SHA-256 of outcomes and scores."""
    success: Mapping[str, Any]
    """Mean over tasks with its interval, computed from the outcomes."""
    notes: str = ""
    weights: str | None = None
    """Folder of the published model, next to the entry's file: ``policies/NAME``."""

    def __post_init__(self) -> None:
        """Raise ValueError if a field is invalid: a ledger may come from anybody."""
        kind = EngineKind(self.engine)
        numbers = [list(self.scores.values()), *self.outcomes.values()]
        kinds = {type(each) for found in numbers for each in found}
        if not self.outcomes or not all(numbers) or not kinds <= {int, float}:
            raise ValueError("outcomes and scores are numbers for each task, and there is at least one task")
        if not isinstance(self.panel, str) or not isinstance(self.success, Mapping):
            raise ValueError("panel is a name and success has figures")
        if self.weights is not None and (self.weights != f"{POLICIES}/{self.name}" or not kind.has_folder):
            raise ValueError(f"weights is {self.weights!r} and can only be {POLICIES}/{self.name} of a model's folder")

    def recompute(self) -> Estimate:
        """The success from the outcomes."""
        return estimate_outcomes(self.outcomes)


def digest_outcomes(outcomes: Mapping[str, Sequence[float]], scores: Mapping[str, float]) -> str:
    """SHA-256 of a run's results."""
    return hashlib.sha256(canonical_json([dict(outcomes), dict(scores)]).encode()).hexdigest()


def _collect(episodes: Sequence[Trajectory], panel: Panel) -> tuple[dict[str, list[float]], dict[str, float]]:
    by_task: dict[str, list[Trajectory]] = {}
    for episode in sorted(episodes, key=lambda each: (each.task_id, each.seed)):
        if episode.stop is StopReason.FAULT:
            raise SpearError(f"{episode.task_id} was cut short by a fault: run the same command again until none is.")
        by_task.setdefault(episode.task_id, []).append(episode)
    short = [task for task, found in by_task.items() if len(found) != panel.protocol.samples]
    if short:
        raise SpearError(
            f"{len(short)} tasks have another number of samples than the {panel.protocol.samples} of panel"
            f" {panel.name}, the first {short[0]}: play the whole panel with spear eval --panel."
        )
    outcomes = {task: [float(each.won) for each in found] for task, found in by_task.items()}
    scores = {task: round(sum(each.score for each in found) / len(found), 9) for task, found in by_task.items()}
    return outcomes, scores


def require_panel(run: Path, name: str) -> Mapping[str, Any]:
    """Return the settings of a run that was played on a panel. Raises SpearError if it was played differently.

    A run without a panel's name may have been played with all its settings.
    """
    panel, settings = open_panel(name), read_settings(run)
    played = PlayedPanel.read(settings)
    if played is not None and played.digest != write_named_panel(name)["digest"]:
        raise SpearError(f"{run} was played on another panel than {panel.name}, {played.label}: {_play_it(name)}")
    has_folder = settings.get("engine") in (EngineKind.HF, EngineKind.VLLM)
    player = EvalSettings(panel.env_id, *((EngineKind.HF, "a model") if has_folder else (EngineKind.EXPERT,)))
    wanted = json.loads(json.dumps(asdict(panel.make_settings(player))))
    for key in DECIDED:
        if key == "max_tokens" and panel.protocol.max_tokens is None:  # the model's own limit
            continue
        value = wanted.get(key)
        if settings.get(key, getattr(EvalSettings, key, None)) != value:
            raise SpearError(
                f"{run} was played with {key}={settings.get(key)!r} and panel {panel.name} says {value!r}:"
                f" {_play_it(name)}"
            )
    return settings


def _play_it(name: str) -> str:
    return f"play it with spear eval --panel {name}."


def add_entry(
    run: Path,
    panel_name: str,
    name: str,
    folder: Path,
    *,
    model: str | None = None,
    notes: str = "",
    publish: bool = False,
) -> Path:
    """Write the entry ``name`` of a finished run of ``spear eval --panel NAME --out`` into a ledger; return its file.

    ``model`` is what the model is called, by default the end of its path, and ``notes`` a sentence for readers.
    ``publish`` copies the model's folder next to the entry, so that anybody can play it again.

    Raises SpearError if the run is incomplete or not on that panel, the entry exists or its name is invalid, the ledger
    cannot be written, or the model to publish has changed.
    """
    if not _NAME.fullmatch(name):
        raise SpearError(f"{name!r} is not a valid name: use letters, digits, '_', '-', '+' and '.'.")
    path = folder / f"{name}.json"
    if path.exists():
        raise SpearError(f"{path} exists: an entry is never changed; choose another name.")
    panel, settings = open_panel(panel_name), require_panel(run, panel_name)
    named = panel.name if panel.name in OFFICIAL else panel_name  # what opens it again: a name, or a file
    engine = str(settings.get("engine"))
    outcomes, scores = _collect(read_last(run / EPISODES), panel)
    written = write_named_panel(panel_name)
    if missing := {task["id"] for task in written["tasks"]} ^ outcomes.keys():
        raise SpearError(f"{run} does not hold the tasks of panel {panel.name}: {len(missing)} differ.")
    shown = model or (Path(str(settings["model"])).name if settings.get("model") else None)
    weights = _publish(settings, name, folder) if publish else None
    played = f"{folder.resolve().name}/{weights}" if weights else shown
    player = f"--engine {engine}" + (f" --model {shlex.quote(played)}" if played else "")
    entry = Entry(
        name=name,
        panel=named,
        panel_digest=written["digest"],
        fingerprint=written["fingerprint"],
        engine=engine,
        model=shown,
        model_digest=settings.get("model_digest"),
        code=spear_envs.__version__,
        command=f"spear eval --panel {shlex.quote(named)} {player}",
        outcomes=outcomes,
        scores=scores,
        digest=digest_outcomes(outcomes, scores),
        success=plain_estimate(estimate_outcomes(outcomes)),
        notes=notes,
        weights=weights,
    )
    write_text(path, json.dumps(asdict(entry)) + "\n")
    return path


def _publish(settings: Mapping[str, Any], name: str, folder: Path) -> str:
    """Copy the model of a run into the ledger's folder; return its place there."""
    model = settings.get("model")
    if model is None or settings.get("model_digest") is None or not Path(str(model)).is_dir():
        named = "a scripted player" if model is None else model
        raise SpearError(f"{named} is not the folder of a model: --publish copies one, so leave it out.")
    if (settings.get("vllm") or {}).get("lora"):
        raise SpearError(f"{model} was played with an adapter: --publish copies one folder, so merge them first.")
    source, weights = Path(str(model)), f"{POLICIES}/{name}"
    if digest_model(source) != settings["model_digest"]:
        raise SpearError(f"{source} holds other weights than the run was played with: play the panel again.")
    target = folder / weights
    if target.resolve() == source.resolve():
        return weights
    if target.exists():
        raise SpearError(f"{target} exists: choose another name, or remove the folder if no entry needs it.")
    draft = target.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(source, draft)
        put_folder(draft, target)
    except OSError as error:
        raise explain_unwritable(target, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return weights


def read_entries(folder: Path) -> Iterator[Entry]:
    """Read the entries of a ledger, by name. Raises SpearError if there is none, or a file is not an entry."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise SpearError(f"{folder} does not contain an entry: python -m benchmarks.ledger add writes one.")
    for path in paths:
        try:
            entry = Entry(**json.loads(read_regular(path)))
        except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
            raise SpearError(f"{path} is not an entry of a ledger ({type(error).__name__}): {error}") from error
        if entry.name != path.stem:
            raise SpearError(f"{path} contains the entry {entry.name!r}: name a file after its entry.")
        yield entry


def check_entry(entry: Entry) -> list[str]:
    """List the mismatches of an entry: figures, digest, or the panel in the installed code, its tasks and samples."""
    lines = []
    if digest_outcomes(entry.outcomes, entry.scores) != entry.digest:
        lines.append("the digest does not match its outcomes")
    if plain_estimate(entry.recompute()) != dict(entry.success):
        lines.append(f"its outcomes give {format_percent(entry.recompute())}, unlike its figures")
    try:
        written = write_named_panel(entry.panel)
    except SpearError as error:
        return [*lines, str(error)]
    if written["fingerprint"] != entry.fingerprint:
        lines.append(f"panel {entry.panel} has other tasks here (fingerprint {written['fingerprint'][:12]})")
    elif written["digest"] != entry.panel_digest:
        lines.append(f"panel {entry.panel} is played differently here (digest {written['digest'][:12]})")
    tasks, samples = {task["id"] for task in written["tasks"]}, written["protocol"]["samples"]
    if others := (tasks ^ entry.outcomes.keys()) | (tasks ^ entry.scores.keys()):
        lines.append(f"{len(others)} of its tasks are not those of panel {entry.panel}, such as {min(others)}")
    elif wrong := [task for task, wins in entry.outcomes.items() if len(wins) != samples or {*wins} - {0, 1}]:
        lines.append(f"{wrong[0]} has the outcomes {entry.outcomes[wrong[0]]}, not {samples} of 0 or 1")
    return lines


def check_again(entry: Entry, folder: Path) -> tuple[bool, str] | None:
    """Play an entry again and describe whether it holds; None if its model is not published.

    A scripted player must end every episode as recorded. A model must come out within the entry's interval, since the
    last digits of a float, and with them some sampled tokens, differ between processors.
    """
    panel, engine = open_panel(entry.panel), EngineKind(entry.engine)
    if entry.engine in SCRIPTED:
        outcomes, scores = _collect(
            run_evaluation(panel.make_settings(EvalSettings(panel.env_id, engine))).trajectories, panel
        )
        same = digest_outcomes(outcomes, scores) == entry.digest
        return same, "played again" if same else "played again, episodes end differently"
    if entry.weights is None:
        return None
    model = folder / entry.weights
    if not model.is_dir() or digest_model(model) != entry.model_digest:
        return False, f"{model} does not hold the weights of {entry.name}: restore the folder from the repository"
    settings = panel.make_settings(EvalSettings(panel.env_id, engine, model=str(model)))
    fits, words = _compare(entry, *_collect(run_evaluation(settings, deterministic=True).trajectories, panel))
    return fits, f"played again: {words}"


def check_run(entry: Entry, run: Path) -> tuple[bool, str]:
    """Describe whether another run is within the entry's interval. Raises SpearError if it is not on its panel."""
    require_panel(run, entry.panel)
    outcomes, scores = _collect(read_last(run / EPISODES), open_panel(entry.panel))
    if outcomes.keys() != entry.outcomes.keys():
        raise SpearError(f"{run} is on other tasks than {entry.name}: play panel {entry.panel}.")
    return _compare(entry, outcomes, scores)


def _compare(entry: Entry, outcomes: Mapping[str, Sequence[float]], scores: Mapping[str, float]) -> tuple[bool, str]:
    """Describe whether a run's success is within the interval of an entry."""
    found, recorded = estimate_outcomes(outcomes), entry.recompute()
    if digest_outcomes(outcomes, scores) == entry.digest:
        return True, f"{format_percent(found)}: the same episodes"
    fits = recorded.low <= found.mean <= recorded.high
    return fits, f"{format_percent(found)} {'is within' if fits else 'is outside'} {format_percent(recorded)}"


def write_named_panel(name: str) -> Mapping[str, Any]:
    """A panel with its tasks, as the installed code makes it."""
    return _write_official(name) if name in OFFICIAL else write_panel(open_panel(name))


@lru_cache(maxsize=16)
def _write_official(name: str) -> Mapping[str, Any]:
    return write_panel(OFFICIAL[name])
