"""Facts about game files that do not need playing, cached between processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.gamefile import make_text, read_game_json
from spear_envs.alfworld.task_types import TaskType
from spear_envs.core.errors import SpearError
from spear_envs.data import data_folder
from spear_envs.data.files import digest_file, write_text

GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"
_EXCLUDED = ("movable", "Sliced")
_TYPES = frozenset(kind.value for kind in TaskType)
_VERSION = 1
"""Of the cached records; other versions are ignored."""


class LeftOut(str, Enum):
    """Why a game in the folder of a split does not belong to it, by alfworld's rules."""

    KIND = "movable or Sliced in its path"
    NO_GAME = "no game.tw-pddl beside its traj_data.json"
    NO_TRAJECTORY = "no traj_data.json beside its game.tw-pddl"
    UNMARKED = "nothing under 'solvable'"
    UNSOLVABLE = "marked as not solvable"
    TYPE = "a task type that is none of the six"


@dataclass(frozen=True)
class GameRecord:
    """One ``game.tw-pddl`` and its ``traj_data.json``."""

    path: str
    """Of the game, relative to the folder of its split, with slashes."""
    sha256: str
    """Of the game file, hex."""
    task_type: str = ""
    """ALFRED's name of the task type; empty if it is not known."""
    sentence: str = ""
    """The task in the game's words."""
    human: str = ""
    """The first sentence that a person wrote about it; may be empty."""
    left_out: LeftOut | None = None
    """Why it does not belong to its split; None if it does."""
    fault: str = ""
    """Why it cannot be played. It keeps its place in the split, so that others keep their numbers."""


@dataclass(frozen=True)
class Listing:
    """What was found in the folder of a split."""

    games: tuple[GameRecord, ...]
    """The games of the split, sorted by path; the number of a task is its place here."""
    left_out: Mapping[LeftOut, int]
    """How many were left out, by reason."""


def scan_split(folder: Path, elsewhere: Sequence[Path] = ()) -> Listing:
    """List all games below the folder of a split.

    Records are cached in the data folder by size and time of the files: the first scan of 3,553 games takes seconds,
    later ones a fraction of one.

    Args:
        folder: such as ``json_2.1.2/valid_seen``.
        elsewhere: folders of the same split of other releases, for games without a ``traj_data.json``.

    Raises:
        GameError: the folder cannot be read.
    """
    memory = _Memory(folder)
    games: list[GameRecord] = []
    left_out: Counter[LeftOut] = Counter()
    for name, game, trajectory in walk(folder, elsewhere):
        excluded = any(word in name for word in _EXCLUDED)
        if excluded or game is None or trajectory is None:
            reason = LeftOut.NO_GAME if game is None else LeftOut.NO_TRAJECTORY
            left_out[LeftOut.KIND if excluded else reason] += 1
            continue
        stamp = (game.st_size, game.st_mtime_ns, trajectory[1].st_size, trajectory[1].st_mtime_ns)
        record = memory.recall(name, stamp) or read_record(folder / name, trajectory[0], name)
        memory.note(record, stamp)
        if record.left_out is None:
            games.append(record)
        else:
            left_out[record.left_out] += 1
    memory.save()
    games.sort(key=lambda record: record.path)
    return Listing(tuple(games), dict(left_out))


def walk(
    folder: Path, elsewhere: Sequence[Path] = ()
) -> Iterator[tuple[str, os.stat_result | None, tuple[Path, os.stat_result] | None]]:
    """For every folder with a game or a trajectory: path of the game, and the state of the two files.

    Links to folders are followed, each folder once: a link that leads back into the tree adds nothing.
    """
    waiting, links = [folder], list[Path]()
    seen: set[tuple[int, int]] = set()
    while waiting or links:
        place = waiting.pop() if waiting else links.pop()
        files: dict[str, os.stat_result] = {}
        try:
            state = place.stat()
            if (state.st_dev, state.st_ino) in seen:
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(place) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
                    if entry.is_dir():
                        (links if entry.is_symlink() else waiting).append(Path(entry.path))
                    elif entry.name in (GAME_FILE, TRAJECTORY_FILE):
                        files[entry.name] = entry.stat()
        except OSError as error:
            raise GameError(f"{error.filename} cannot be read ({error.strerror}): fix its permissions.") from None
        if not files:
            continue
        inner = place.relative_to(folder)
        trajectory = (place / TRAJECTORY_FILE, files[TRAJECTORY_FILE]) if TRAJECTORY_FILE in files else None
        for other in elsewhere if trajectory is None else ():
            if (other / inner / TRAJECTORY_FILE).is_file():
                trajectory = (other / inner / TRAJECTORY_FILE, (other / inner / TRAJECTORY_FILE).stat())
                break
        yield (inner / GAME_FILE).as_posix(), files.get(GAME_FILE), trajectory


class _Memory:
    """Cached records of one folder, in a file of the data folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        key = hashlib.sha256(self._folder.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._path = data_folder() / "cache" / f"alfworld-{key}.json"
        self._old = self._load()
        self._new: dict[str, list[Any]] = {}

    def _load(self) -> dict[str, list[Any]]:
        try:
            data = json.loads(self._path.read_bytes())
            return data["games"] if (data["version"], data["folder"]) == (_VERSION, self._folder) else {}
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return {}

    def recall(self, name: str, stamp: tuple[int, ...]) -> GameRecord | None:
        """The record of unchanged files, if it is cached."""
        try:
            old, digest, task_type, sentence, human, left_out, fault = self._old[name]
            if tuple(old) != stamp:
                return None
            return GameRecord(
                name, digest, task_type, sentence, human, LeftOut(left_out) if left_out is not None else None, fault
            )
        except (KeyError, ValueError, TypeError):
            return None

    def note(self, record: GameRecord, stamp: tuple[int, ...]) -> None:
        """Cache a record."""
        left_out = record.left_out.value if record.left_out is not None else None
        self._new[record.path] = [
            list(stamp), record.sha256, record.task_type, record.sentence, record.human, left_out, record.fault
        ]  # fmt: skip

    def save(self) -> None:
        """Write the cache if it has changed and the disk allows it."""
        if self._new == self._old:
            return
        text = json.dumps({"version": _VERSION, "folder": self._folder, "games": self._new})
        with suppress(SpearError):
            write_text(self._path, text, synced=False)


def read_record(path: Path, trajectory: Path, name: str) -> GameRecord:
    """Read one game."""
    task_type, human, fault = _read_trajectory(trajectory)
    kind = name.rpartition("/")[0].partition("-")[0]  # official folders begin with the task type
    task_type = task_type or (kind if kind in _TYPES else "")
    digest = ""
    try:
        digest = digest_file(path)
        data = read_game_json(path)
        sentence = make_text(data, path).sentence
    except OSError as error:
        return GameRecord(name, digest, task_type, fault=f"it cannot be read ({error.strerror})")
    except GameError as error:
        return GameRecord(name, digest, task_type, human=human, fault=str(error).removeprefix(f"{path} "))
    solvable = data.get("solvable")
    left_out = LeftOut.UNMARKED if solvable is None else None if solvable is True else LeftOut.UNSOLVABLE
    if task_type not in _TYPES:
        left_out = LeftOut.TYPE
    return GameRecord(name, digest, task_type, sentence, human, left_out, fault)


def _read_trajectory(path: Path) -> tuple[str, str, str]:
    """Task type, the first sentence of a person, and what is wrong with the file."""
    try:
        data = json.loads(path.read_bytes())
        task_type = data["task_type"]
        sentences = [note["task_desc"].strip() for note in data.get("turk_annotations", {}).get("anns", [])]
        if not isinstance(task_type, str):
            raise TypeError
    except OSError as error:
        return "", "", f"its {path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return "", "", f"its {path.name} is broken: unpack the archive again"
    return task_type, next(filter(None, sentences), ""), ""
