"""The content of a run folder: recorded episodes, read one by one, and metrics of a training."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from spear_agents.comparison.statistics import estimate_mean, plain_estimate, split_numbers
from spear_agents.engines.base import Decoder
from spear_agents.evaluation.records import (
    EPISODES,
    FINE_TUNING,
    METRICS_FOLDER,
    PANELS,
    PROGRESS,
    is_of,
    read_history,
    read_settings,
    sum_usage,
)
from spear_agents.evaluation.settings import PlayedPanel
from spear_agents.play.trajectory import MOST_LINE, Trajectory
from spear_agents.viewer.episodes import describe_episode, finite, open_decoder
from spear_envs.core.errors import SpearError
from spear_envs.data.files import open_regular, read_regular
from spear_sandbox.terminal import format_seconds

SHOWN_SETTINGS = {"env_id": "environment", "env_kwargs": "keywords"} | {
    key: key for key in ("panel", "split", "engine", "model", "method", "temperature", "agent")
}
"""Settings of a run shown on the page, and their titles there."""


def describe_sources(
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    written: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Describe each source, and each step of a training's source, for the table of runs.

    Args:
        rows: the list of episodes; those that do not count are ignored.
        settings: of each source.
        written: when each source was last written, in seconds since 1970.

    Returns:
        For each source its ``name``, ``source``, ``step``, ``env``, ``settings`` (as text), ``tokens``, ``cost`` and
        ``seconds`` (sums over episodes, None if unknown), ``date`` (``YYYY-MM-DD hh:mm`` in UTC, None if unknown), and
        ``parts``: all episodes first (``subtask`` is None), then each subtask, with success and its 95 % interval.
    """
    groups: dict[tuple[str, int | None], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["counts"]:
            groups[row["source"], row["step"]].append(row)
    return [
        _describe(source, step, found, settings.get(source, {})) | {"date": _format_date((written or {}).get(source))}
        for (source, step), found in groups.items()
    ]


def _format_date(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # a file may be of the year 10000
        return None


def _describe(
    source: str, step: int | None, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    subtasks: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        subtasks[row["subtask"]].append(row)
    parts = [_describe_part(None, rows)]
    if len(subtasks) > 1:
        parts += [_describe_part(name, subtasks[name]) for name in sorted(subtasks, key=split_numbers)]
    return {
        "name": source if step is None else f"{source} of step {step}",
        "source": source,
        "step": step,
        "env": ", ".join(sorted({row["env"] for row in rows})),
        "settings": {
            title: ", ".join(f"{name}={each}" for name, each in value.items())
            if isinstance(value, Mapping)
            else str(value)
            for key, title in SHOWN_SETTINGS.items()
            if (value := settings.get(key) if key != "panel" else _name_panel(settings))
        },
        "tokens": sum(row["tokens"] for row in rows),
        "cost": _sum(row["cost"] for row in rows),
        "seconds": _sum(row["seconds"] for row in rows),
        "parts": parts,
    }


def _name_panel(settings: Mapping[str, Any]) -> str | None:
    with suppress(SpearError):  # a page shows what it can
        found = PlayedPanel.read(settings)
        return None if found is None else found.label
    return None


def _describe_part(subtask: str | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    valid = [row for row in rows if row["stop"] != "fault"]
    won: dict[str, list[bool]] = defaultdict(list)
    for row in valid:
        won[row["task"]].append(row["won"])
    return {
        "subtask": subtask,
        "episodes": len(valid),
        "faults": len(rows) - len(valid),
        "success": plain_estimate(estimate_mean(list(map(fmean, won.values())))) if won else None,
        "score": _mean(row["score"] for row in valid),
        "reward": _mean(row["reward"] for row in valid),
        "turns": _mean(row["turns"] for row in valid),
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite(round(sum(known), 6)) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    with suppress(OverflowError):  # of values near the largest
        return round(fmean(known), 4) if known else None
    return None


LONGEST_PAUSE = 120.0
"""Seconds without an episode from which the page no longer foretells the end of an evaluation."""
DEPTH = 3
"""Depth of folders searched for evaluations."""
SHOWN = 240
"""Maximum characters of an instruction in the list."""

_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Raised by reading a line that is not an episode, or has values of other types."""


@dataclass
class Source:
    """One file of episodes."""

    path: Path
    name: str
    settings: Mapping[str, Any]
    size: int = 0
    inode: int = 0
    written: float = 0.0
    """When the file was last written, in seconds since 1970."""
    noticed: float = 0.0
    """When that was noticed, by the monotonic clock."""
    env_id: str | None = None
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Entry:
    """Place of an episode in its file, and its row in the list."""

    source: Source
    offset: int
    length: int
    row: dict[str, Any] = field(repr=False)


class Run:
    """The episodes and metrics of a folder, and of folders below it, or of one JSON-lines file. Thread-safe.

    Lines of another environment or other tasks than the settings of their folder name are shown as a source of their
    own. ``tokenizer`` is its folder if the one in the settings is gone; with ``trust`` pictures are drawn whatever the
    settings name. Raises SpearError if there is nothing to show, or for a line that is not an episode.
    """

    def __init__(self, path: str | Path, tokenizer: Path | None = None, *, trust: bool = False) -> None:
        self.path = Path(path)
        self._tokenizer = tokenizer
        self._trust = trust
        self._sources: dict[Path, Source] = {}
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        if not self.path.exists():
            raise SpearError(f"{path} does not exist: give a folder of spear eval, play or train")
        if self.path.is_file() and self.path.suffix != ".jsonl":
            raise SpearError(f"{path} is not a file of episodes: give its folder, or {EPISODES} in it")
        self.refresh()
        if not self._sources and not self._find_trainings():
            raise SpearError(f"{path} has no {EPISODES} and no metrics: give a folder of spear eval, play or train")

    @property
    def title(self) -> str:
        """Name of the run, from its folder; invalid bytes are replaced."""
        return os.fsencode(self.path.resolve().name).decode("utf-8", "replace")

    def refresh(self) -> None:
        """Read new lines, and drop removed files; a torn last line is left for later."""
        with self._lock:
            found = {path: path.stat() for path in self.find_files()}
            # A replaced file is read anew, and so is an empty one: its settings may come later.
            self._sources = {
                path: source
                for path, source in self._sources.items()
                if path in found and found[path].st_ino == source.inode and 0 < source.size <= found[path].st_size
            }
            self._entries = [each for each in self._entries if self._sources.get(each.source.path) is each.source]
            for path, state in found.items():
                if path not in self._sources:
                    self._sources[path] = Source(path, self._name(path), _read_settings(path), inode=state.st_ino)
                source = self._sources[path]
                if source.written != state.st_mtime:
                    source.written, source.noticed = state.st_mtime, time.monotonic()
                self._entries += _scan(source)

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping for each episode, its number ``i`` among them.

        ``counts`` is False if the same sample of a task was played again later: after a fault, or as a further trial of
        a policy that learns within a task. As for ``spear compare``, a fault does not replace what had ended.
        """
        with self._lock:
            rows = [{"i": i, **entry.row} for i, entry in enumerate(self._entries)]
        last: dict[tuple[Any, ...], int] = {}
        for row in rows:
            before = rows[last.get(_name_job(row), row["i"])]
            if row["stop"] != "fault" or before["stop"] == "fault" or before["reflected"]:
                last[_name_job(row)] = row["i"]
        # A person may play a task as often as they like.
        return [row | {"counts": row["person"] or last[_name_job(row)] == row["i"]} for row in rows]

    def read_episode(self, number: int) -> dict[str, Any]:
        """Describe an episode for the page. Raises IndexError, or SpearError if the file was removed or has changed."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise IndexError(number)
            entry = self._entries[number]
        source, trajectory = entry.source, _read_entry(entry)
        open_model = partial(self._open_decoder, source)
        try:
            return {"i": number, **describe_episode(trajectory, source.settings, open_model, trust=self._trust)}
        except _MALFORMED as error:
            raise SpearError(f"{source.path}, byte {entry.offset}: a value is of another type ({error})") from error

    def search(self, text: str) -> list[int]:
        """Return the numbers of the episodes whose texts have all words of ``text``, in any case. Raises SpearError."""
        words = text.lower().split()
        with self._lock:
            entries = list(self._entries)
        found = []
        for number, entry in enumerate(entries):
            trajectory = _read_entry(entry)
            said = [part for turn in trajectory.turns for part in (turn.observation, turn.response)]
            said += [trajectory.final_observation, trajectory.reflection or ""]
            whole = "\n".join(said).lower()
            if all(word in whole for word in words):
                found.append(number)
        return found

    def mark(self) -> str:
        """Digest that changes when something was written to the run."""
        metrics = (file for folder in self._find_trainings() for file in (folder / METRICS_FOLDER).glob("*.jsonl"))
        digest = hashlib.sha256()
        for path in (*self.find_files(), *metrics):
            with suppress(OSError):
                digest.update(f"{path} {path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def describe_progress(self) -> list[str]:
        """Return a line for each evaluation under way: episodes played and planned, and the time left.

        Where no episode has ended for a while the line says for how long instead.
        """
        lines = []
        with self._lock:
            sources = [each for each in self._sources.values() if (each.path.parent / PROGRESS).is_file()]
        done = Counter(row["source"] for row in self.rows() if row["counts"]) if sources else Counter()
        for source in sources:
            try:
                found = json.loads(read_regular(source.path.parent / PROGRESS))
                planned, before = int(float(found["planned"])), int(float(found["before"]))  # JSON has larger integers
                began = (source.path.parent / PROGRESS).stat().st_mtime
            except (OSError, *_MALFORMED):
                continue
            played = done[source.name]
            each, idle = (source.written - began) / max(1, played - before), time.monotonic() - source.noticed
            if played <= before or played > planned:
                rest = ""
            elif idle > max(LONGEST_PAUSE, 5 * each):
                rest = f", none for {format_seconds(idle)}"
            else:
                rest = f", about {format_seconds(each * (planned - played))} left"
            lines.append(f"{source.name}: {played:,} of {planned:,} episodes{rest}")
        return lines

    def read_trainings(self) -> list[dict[str, Any]]:
        """Return for each training its ``name``, its ``steps``, and ``metrics`` with a value or None for each step."""
        trainings = []
        for folder in self._find_trainings():
            history = read_history(folder)
            names = sorted({name for record in history for name in record} - {"step"})
            columns = {name: [finite(record.get(name)) for record in history] for name in names}
            columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
            if columns:
                steps = [record["step"] for record in history]
                trainings.append({"name": self._name(folder / "x"), "steps": steps, "metrics": columns})
        return trainings

    def summarise(self) -> dict[str, Any]:
        """Return the initial data of the page."""
        rows = self.rows()
        with self._lock:
            settings = {source.name: source.settings for source in self._sources.values()}
            written = {source.name: source.written for source in self._sources.values()}
        return {
            "title": self.title,
            "episodes": rows,
            "sources": describe_sources(rows, settings, written),
            "trainings": self.read_trainings(),
            "panels": [{"title": title, "series": series} for title, series in (*PANELS, *FINE_TUNING)],
        }

    def _open_decoder(self, source: Source) -> Decoder:
        with self._lock:
            if source.decoder is None:
                source.decoder = open_decoder(source.settings, source.path.parent, self._tokenizer)
            return source.decoder

    def find_files(self) -> list[Path]:
        """Return the files of episodes."""
        if self.path.is_file():
            return [self.path]
        return [folder / EPISODES for folder in _walk(self.path) if (folder / EPISODES).is_file()]

    def _find_trainings(self) -> list[Path]:
        return [folder for folder in _walk(self.path) if any((folder / METRICS_FOLDER).glob("*.jsonl"))]

    def _name(self, path: Path) -> str:
        if self.path.is_file():
            return self.path.name
        name = path.parent.relative_to(self.path).as_posix()
        if name == ".":
            return self.title
        return f"./{name}" if name == self.title else name


def _read_settings(path: Path) -> Mapping[str, Any]:
    """Return the settings beside a file of episodes; empty where it comes without any."""
    with suppress(SpearError):
        return read_settings(path.parent)
    return {}


def _walk(root: Path) -> Iterator[Path]:
    """Yield a folder and those below it, without hidden ones and links."""
    for parent, folders, _ in os.walk(root):
        level = len(Path(parent).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if level < DEPTH else []
        yield Path(parent)


def _read_entry(entry: Entry) -> Trajectory:
    """Read an episode from its place in its file. Raises SpearError if the file was removed or has changed."""
    try:
        with open_regular(entry.source.path) as file:
            file.seek(entry.offset)
            return Trajectory.from_json(file.read(entry.length).decode("ascii"))
    except (OSError, *_MALFORMED) as error:
        raise SpearError(f"{entry.source.path} has changed: start spear view again") from error


def _scan(source: Source) -> list[Entry]:
    """Read entries of complete lines after ``source.size``, and advance it unless one of them is malformed."""
    entries, size = [], source.size
    try:
        with open_regular(source.path) as file:
            file.seek(size)
            for line in iter(lambda: file.readline(MOST_LINE), b""):
                if len(line) == MOST_LINE:
                    raise SpearError(f"{source.path}, byte {size}: more than {MOST_LINE >> 20} MiB in a line")
                if not line.endswith(b"\n"):
                    break
                try:
                    row = _describe_row(Trajectory.from_json(line.decode("ascii")), source)
                except _MALFORMED as error:
                    text = f"{type(error).__name__}: {error}"[:SHOWN]
                    raise SpearError(f"{source.path}, byte {size}: not a trajectory ({text})") from error
                entries.append(Entry(source, size, len(line), row))
                size += len(line)
    except OSError as error:
        raise SpearError(f"{source.path} cannot be read: {error.strerror}") from error
    source.size = size
    return entries


def _describe_row(trajectory: Trajectory, source: Source) -> dict[str, Any]:
    usage = sum_usage([trajectory])
    source.env_id = source.env_id or source.settings.get("env_id") or trajectory.env_id
    tasks = source.settings.get("fingerprint", trajectory.fingerprint)
    is_own = is_of(trajectory, str(source.env_id), tasks)
    foreign = f"{source.name}, another evaluation: {trajectory.env_id}, tasks {trajectory.fingerprint[:12]}"
    return {
        "source": source.name if is_own else foreign,
        "env": str(trajectory.env_id),
        "task": str(trajectory.task_id),
        "tasks": str(trajectory.fingerprint)[:12],
        "subtask": str(trajectory.subtask),
        "instruction": re.sub(r"\s+", " ", trajectory.instruction[: 2 * SHOWN]).strip()[:SHOWN],
        "won": bool(trajectory.won),
        "score": _round(trajectory.score),
        "reward": _round(trajectory.reward),
        "stop": trajectory.stop.value,
        "turns": len(trajectory.turns),
        "trial": int(trajectory.trial),
        "reflected": trajectory.reflection is not None,
        "step": None if trajectory.step is None else int(trajectory.step),
        "person": source.settings.get("engine") == "person",
        "seed": str(trajectory.seed),  # JavaScript would round a large one
        "tokens": usage.prompt_tokens + usage.completion_tokens,
        "cost": finite(usage.cost),
        "seconds": finite(trajectory.seconds),
    }


def _name_job(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key shared by rows of which only the last counts; validations of a training repeat their seeds."""
    return row["source"], row["step"], row["task"], row["seed"]


def _round(value: float) -> float | None:
    number = finite(value)
    return None if number is None else round(number, 4)
