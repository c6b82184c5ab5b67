"""The content of a run folder: recorded episodes, read one by one, and metrics of a training."""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spear_agents.metrics import FINE_TUNING, METRICS_FOLDER, PANELS, read_history
from spear_agents.records import EPISODES, is_of, read_settings
from spear_agents.replay.bodies import describe_episode, finite
from spear_agents.replay.overview import describe_sources
from spear_agents.replay.tokens import Decoder, open_decoder
from spear_agents.trajectory import MOST_LINE, Trajectory
from spear_agents.usage import sum_usage
from spear_envs.core.errors import SpearError
from spear_envs.data.files import open_regular

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
    own. ``tokenizer`` is its folder if the one in the settings is gone. Raises SpearError if there is nothing to show,
    or for a line that is not an episode.
    """

    def __init__(self, path: str | Path, tokenizer: Path | None = None) -> None:
        self.path = Path(path)
        self._tokenizer = tokenizer
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
        """Read new lines; a torn last line is left for later."""
        with self._lock:
            for path in self._find_files():
                if path not in self._sources:
                    settings: Mapping[str, Any] = {}
                    with suppress(SpearError):  # a file of episodes may come without settings
                        settings = read_settings(path.parent)
                    self._sources[path] = Source(path, self._name(path), settings)
                source = self._sources[path]
                found = path.stat()
                if found.st_size < source.size or found.st_ino != source.inode:  # another file under the old name
                    self._entries = [entry for entry in self._entries if entry.source is not source]
                    source.size, source.inode, source.env_id = 0, found.st_ino, None
                self._entries += _scan(source)

    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each episode, its number ``i`` among them.

        ``counts`` is False if the same sample of a task was played again later: after a fault, or as a further trial of
        a policy that learns within a task.
        """
        with self._lock:
            rows = [{"i": i, **entry.row} for i, entry in enumerate(self._entries)]
        last = {_name_job(row): row["i"] for row in rows}
        # A person may play a task as often as they like.
        return [row | {"counts": row["person"] or last[_name_job(row)] == row["i"]} for row in rows]

    def read_episode(self, number: int) -> dict[str, Any]:
        """Describe an episode for the page. Raises IndexError, or SpearError if the file was removed or has changed."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise IndexError(number)
            entry = self._entries[number]
        source, trajectory = entry.source, _read_entry(entry)
        try:
            return {"i": number, **describe_episode(trajectory, source.settings, lambda: self._open_decoder(source))}
        except _MALFORMED as error:
            raise SpearError(
                f"{source.path}, byte {entry.offset}: a value is of another type ({error}): remove the line"
            ) from error

    def search(self, text: str) -> list[int]:
        """Numbers of the episodes whose texts have all words of ``text``, in any case. Raises SpearError."""
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
        for path in (*self._find_files(), *metrics):
            with suppress(OSError):
                digest.update(f"{path} {path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def read_trainings(self) -> list[dict[str, Any]]:
        """The metrics of each training: its ``name``, ``steps``, and ``metrics`` with a value or None for each step."""
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
        """The initial data of the page."""
        rows = self.rows()
        with self._lock:
            settings = {source.name: source.settings for source in self._sources.values()}
        return {
            "title": self.title,
            "episodes": rows,
            "sources": describe_sources(rows, settings),
            "trainings": self.read_trainings(),
            "panels": [{"title": title, "series": series} for title, series in (*PANELS, *FINE_TUNING)],
        }

    def _open_decoder(self, source: Source) -> Decoder:
        with self._lock:
            if source.decoder is None:
                source.decoder = open_decoder(source.settings, source.path.parent, self._tokenizer)
            return source.decoder

    def _find_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        return [folder / EPISODES for folder in _walk(self.path) if (folder / EPISODES).is_file()]

    def _find_trainings(self) -> list[Path]:
        return [folder for folder in _walk(self.path) if any((folder / METRICS_FOLDER).glob("*.jsonl"))]

    def _name(self, path: Path) -> str:
        if self.path.is_file():
            return self.path.name
        return path.parent.relative_to(self.path).as_posix().removeprefix(".") or self.title


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
    """Read entries of complete lines after ``source.size``, and advance it."""
    entries = []
    try:
        with open_regular(source.path) as file:
            file.seek(source.size)
            for line in iter(lambda: file.readline(MOST_LINE), b""):
                if len(line) == MOST_LINE:
                    raise SpearError(f"{source.path}, byte {source.size}: more than {MOST_LINE >> 20} MiB in a line")
                if not line.endswith(b"\n"):
                    break
                try:
                    row = _describe_row(Trajectory.from_json(line.decode("ascii")), source)
                except _MALFORMED as error:
                    told = f"{type(error).__name__}: {error}"[:SHOWN]
                    raise SpearError(
                        f"{source.path}, byte {source.size}: not a trajectory ({told}): remove the line"
                    ) from error
                entries.append(Entry(source, source.size, len(line), row))
                source.size += len(line)
    except OSError as error:
        raise SpearError(f"{source.path} cannot be read: {error.strerror}") from error
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
        "subtask": str(trajectory.subtask),
        "instruction": re.sub(r"\s+", " ", trajectory.instruction[: 2 * SHOWN]).strip()[:SHOWN],
        "won": bool(trajectory.won),
        "score": _round(trajectory.score),
        "reward": _round(trajectory.reward),
        "stop": trajectory.stop.value,
        "turns": len(trajectory.turns),
        "trial": int(trajectory.trial),
        "step": None if trajectory.step is None else int(trajectory.step),
        "person": source.settings.get("engine") == "person",
        "seed": int(trajectory.seed),
        "tokens": usage.prompt_tokens + usage.completion_tokens,
        "cost": usage.cost,
    }


def _name_job(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key shared by rows of which only the last counts; validations of a training repeat their seeds."""
    return row["source"], row["step"], row["task"], row["seed"]


def _round(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
