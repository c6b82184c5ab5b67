"""The published games: finding them, their task sets, and facts about them that are cached between processes."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spear_envs.alfworld.gamefile import (
    GameFile,
    GameSource,
    GameText,
    TaskType,
    make_text,
    name_subtask,
    read_game_json,
)
from spear_envs.alfworld.grammar import replace_sentence
from spear_envs.alfworld.pddl import GameError
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import ListTaskSet, Task
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


RELEASES = ("json_2.1.2", "json_2.1.1")
"""Folders that the published archives unpack to, the newest first."""

OFFICIAL_COUNTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "train": {"pick": 790, "look": 308, "clean": 650, "heat": 459, "cool": 533, "pick2": 813},
        "valid_seen": {"pick": 35, "look": 13, "clean": 27, "heat": 16, "cool": 25, "pick2": 24},
        "valid_unseen": {"pick": 24, "look": 18, "clean": 31, "heat": 23, "cool": 21, "pick2": 17},
    }
)
"""Games of each split and subtask in ALFWorld's paper: 3,553, 140 and 134."""

_MEND = (
    "Fetch the games with 'spear data get alfworld', or say where they are with data_dir= or $ALFWORLD_DATA: the folder"
    f" that holds {RELEASES[0]} or {RELEASES[1]}."
)


class TaskText(str, Enum):
    """Who worded the tasks."""

    TEMPLATE = "template"
    """The templates of ALFWorld, as in the published games."""
    HUMAN = "human"
    """The first sentence that a person wrote about the task, from ``traj_data.json``."""


@dataclass(frozen=True)
class SplitFolder:
    """Folder of the games of one split."""

    path: Path
    """Such as ``…/json_2.1.2/valid_seen``."""
    elsewhere: tuple[Path, ...] = ()
    """The same split of other releases, for a missing ``traj_data.json``."""
    published: bool = False
    """Whether its parent is named like a release, so that all of its games should be there."""


def find_data_folder(data_dir: str | Path | None) -> tuple[Path, str]:
    """Where official games are looked for, and why there; the folder need not exist."""
    named = os.environ.get("ALFWORLD_DATA", "").strip()
    if data_dir is not None:
        return Path(data_dir).expanduser(), "data_dir"
    if named:
        return Path(named).expanduser(), "$ALFWORLD_DATA"
    return data_folder() / "alfworld", "the user's cache"


def find_split(data_dir: str | Path | None, split: str) -> SplitFolder:
    """Find the folder of a split.

    Args:
        data_dir: the folder with ``json_2.1.2`` or ``json_2.1.1`` in it, or any folder with a folder of the split's
            name in it or one level deeper. None: ``$ALFWORLD_DATA``, else the user's cache.
        split: name of the folder to find.

    Raises:
        SpearError: it was not found; the message says where it was looked for and how to get it.
    """
    base, origin = find_data_folder(data_dir)
    if not base.is_dir():
        raise SpearError(f"There are no official games: {base} ({origin}) is not a folder. {_MEND}")
    folders = [base / release / split for release in RELEASES] + [base / split, *sorted(base.glob(f"*/{split}"))]
    found = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    for number, folder in enumerate(found):
        if any(game is not None for _, game, _ in walk(folder)):
            published = folder.parent.name in RELEASES
            return SplitFolder(folder, tuple(found[:number] + found[number + 1 :]), published)
    if found:
        raise SpearError(f"There is no {GAME_FILE} below {found[0]}. {_MEND}")
    near = f" {base.parent} holds it: name that one." if (base.parent / split).is_dir() else ""
    raise SpearError(f"There are no official games of the split {split!r} in {base} ({origin}).{near or ' ' + _MEND}")


@dataclass(frozen=True, slots=True)
class ListedGame:
    """A game file of a task set, compared with its record; a :class:`GameSource`."""

    path: Path
    record: GameRecord
    text: TaskText = TaskText.TEMPLATE

    def __str__(self) -> str:
        return str(self.path)

    @property
    def key(self) -> Hashable:
        """Path, time and size of the file, and who worded the task; raises GameError if the file is gone."""
        return GameFile(self.path).key, self.text

    def read(self) -> GameText:
        """The game.

        Raises:
            GameError: the file cannot be read, is broken, lacks a human sentence if that is wanted, or has changed.
        """
        text = GameFile(self.path).read()
        if digest_file(self.path) != self.record.sha256:
            raise GameError(f"{self.path} has changed since the task set was made: make a new environment.")
        if self.text is TaskText.HUMAN:
            if not self.record.human:
                fault = self.record.fault or "nobody wrote one"
                raise GameError(f"{self.path} has no human task text ({fault}): use task_text='template'.")
            assert text.grammar is not None
            grammar = replace_sentence(text.grammar, self.record.human)
            text = replace(text, sentence=self.record.human, grammar=grammar)
        return replace(text, task_type=self.record.task_type)


def _make_task(name: str, split: str, number: str, record: GameRecord, text: TaskText, path: str) -> Task:
    return Task(
        id=f"{name}/{split}/{number}",
        split=split,
        subtask=name_subtask(record.task_type) or "unknown",
        instruction=record.human if text is TaskText.HUMAN else record.sentence,
        content={"path": path, "sha256": record.sha256},
    )


class _FileTaskSet(ListTaskSet):
    """Tasks that are game files."""

    def __init__(self, name: str, split: str, tasks: Sequence[Task], games: Sequence[ListedGame]) -> None:
        super().__init__(tasks, name=name, split=split, digest=lambda task: task.content["sha256"])
        self.games = tuple(games)

    def source(self, task: Task) -> GameSource:
        """Game file of a task of this set."""
        return self.games[self.index_of(task.id)]


class OfficialTaskSet(_FileTaskSet):
    """One split of the published games; tasks are numbered by the sorted paths of their games.

    A game with a broken file keeps its place and raises only when it is played, so that the others keep their numbers;
    ``spear data verify alfworld`` lists such files.
    """

    def __init__(self, folder: SplitFolder, split: str, text: TaskText, listing: Listing) -> None:
        name = "alfworld/official"
        tasks = [
            _make_task(name, split, f"{number:05d}", record, text, record.path)
            for number, record in enumerate(listing.games)
        ]
        super().__init__(name, split, tasks, [ListedGame(folder.path / one.path, one, text) for one in listing.games])
        self.folder = folder


def make_official_set(data_dir: str | Path | None, split: str, text: TaskText) -> OfficialTaskSet:
    """Make the task set of an official split; see :func:`find_split` for the arguments.

    A published split with an unexpected number of games is used with a warning.

    Raises:
        SpearError: no games were found.
    """
    folder = find_split(data_dir, split)
    return _make_official(folder, folder.path.stat().st_mtime_ns, split, text)


# With the time of the folder, so that a running process finds an archive that is unpacked later.
@lru_cache(maxsize=8)
def _make_official(folder: SplitFolder, changed: int, split: str, text: TaskText) -> OfficialTaskSet:
    listing = scan_split(folder.path, folder.elsewhere)
    if not listing.games:
        reasons = "; ".join(f"{count} × {reason.value}" for reason, count in sorted(listing.left_out.items()))
        raise SpearError(f"No game in {folder.path} belongs to the split {split!r} ({reasons}). {_MEND}")
    tasks = OfficialTaskSet(folder, split, text, listing)
    expected = sum(OFFICIAL_COUNTS[split].values())
    if folder.published and len(tasks) != expected:
        warnings.warn(
            f"{folder.path} has {len(tasks):,} games, and the published split {split!r} has {expected:,}: numbers on it"
            " are not comparable. 'spear data verify alfworld' says more.",
            stacklevel=4,
        )
    return tasks


def make_file_set(path: Path, text: TaskText = TaskText.TEMPLATE) -> _FileTaskSet:
    """Make a task set of exactly one game file, which need not belong to a split.

    Raises:
        SpearError: the file cannot be read, is not a game, or lacks a human sentence if that is wanted.
    """
    if path.is_dir():
        raise SpearError(f"game={str(path)!r} is a folder: name the {GAME_FILE} in it.")
    path = path.expanduser().absolute()
    return _make_file_set(path, GameFile(path).key, text)


# With the state of the file, so that a changed one is read again.
@lru_cache(maxsize=256)
def _make_file_set(path: Path, state: Hashable, text: TaskText) -> _FileTaskSet:
    record = read_record(path, path.with_name("traj_data.json"), f"{path.parent.parent.name}/{path.parent.name}/.")
    game = ListedGame(path, record, text)
    game.read()
    task = _make_task("alfworld", "game", record.sha256[:16], record, text, path.name)
    return _FileTaskSet("alfworld", "game", [task], [game])
