"""ALFWorld's task sets: the embedded games, the official ones, or one game file."""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from spear_envs.alfworld.gamefile import (
    GAME_FILE,
    TRAJECTORY_FILE,
    GameFile,
    GameRecord,
    GameSource,
    GameText,
    Listing,
    TaskText,
    TaskType,
    find_task_type,
    name_subtask,
    read_record,
    scan_split,
    walk,
)
from spear_envs.alfworld.pddl import GameError
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import COPIES, RoomSize, rooms_of
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import ListTaskSet, NumberedTaskSet, Task, TaskSet, check_split
from spear_envs.data import data_folder

_LIST = "embedded.json"


@dataclass(frozen=True, slots=True)
class EmbeddedGame:
    """A game of the packaged list; a :class:`GameSource` that makes the game when it is read."""

    task_type: TaskType
    split: str
    size: RoomSize
    seed: int
    digest: str
    """SHA-256 (hex) of its sentence and problem."""

    def __str__(self) -> str:
        return f"the embedded game {self.size.value}/{self.split}/{self.task_type.subtask}/{self.seed}"

    @property
    def key(self) -> Hashable:
        """Return the digest of the content."""
        return self.digest

    @property
    def path(self) -> None:
        """Return None: ``write_game(source.make(), folder)`` writes a file."""
        return None

    def make(self) -> SyntheticGame:
        """Make the game.

        Raises:
            GameError: the result is not the listed game.
        """
        return _make_listed(self)

    def read(self) -> GameText:
        """Read sentence and problem; raise the errors of :meth:`make`."""
        game = self.make()
        return GameText(game.problem, game.sentence, None, None, game.task_type.value)


# A task's sentence and its game are needed one after the other, and making a game takes milliseconds.
@lru_cache(maxsize=32)
def _make_listed(entry: EmbeddedGame) -> SyntheticGame:
    game = make_game(entry.task_type, entry.split, entry.seed, entry.size)
    if game.digest != entry.digest:
        raise GameError(
            f"{entry} differs from the listed one ({game.digest[:12]}… instead of"
            f" {entry.digest[:12]}…): the synthesizer or this Python has changed. Reinstall spear-envs."
        )
    return game


@lru_cache(maxsize=1)
def _read_list() -> Mapping[str, Any]:
    return json.loads(resources.files(__package__).joinpath(_LIST).read_text("utf-8"))


@lru_cache(maxsize=8)
def list_embedded(split: str, size: RoomSize = RoomSize.STANDARD) -> tuple[EmbeddedGame, ...]:
    """Return games of a split in the order of their tasks: the six types take turns, so any prefix is balanced."""
    digests = {find_task_type(name): listed for name, listed in _read_list()[size.value][split].items()}
    longest = max(map(len, digests.values()))
    return tuple(
        EmbeddedGame(kind, split, size, seed, digests[kind][seed])
        for seed in range(longest)
        for kind in TaskType
        if seed < len(digests[kind])
    )


class EmbeddedTaskSet(NumberedTaskSet):
    """One embedded split. Games are made on demand; the fingerprint does not need them."""

    bounded = True

    def __init__(self, split: str, size: RoomSize) -> None:
        name = "embedded" if size is RoomSize.STANDARD else f"embedded-{size.value}"
        self._games = list_embedded(split, size)
        super().__init__(f"alfworld/{name}", split, len(self._games), cache_size=len(self._games))

    def _make_task(self, index: int) -> Task:
        game = self._games[index]
        return Task(
            id=self.id_of(index),
            split=self.split,
            subtask=game.task_type.subtask,
            instruction=game.make().sentence,
            content=self._content_at(index),
        )

    def _content_at(self, index: int) -> dict[str, Any]:
        game = self._games[index]
        return {"rooms": game.size.value, "type": game.task_type.value, "seed": game.seed, "sha256": game.digest}

    def digest(self, index: int) -> str:
        """Return the SHA-256 of the game's sentence and problem, without making it."""
        return self._games[range(len(self))[index]].digest

    def _definition(self) -> Any:
        return [{"id": self.id_of(i), **self._content_at(i)} for i in range(len(self))]

    def source(self, task: Task) -> GameSource:
        """Return the source of the game of a task of this set."""
        return self._games[self.index_of(task.id)]


def list_names(size: RoomSize) -> Iterator[str]:
    """Yield all names of receptacles and objects of embedded rooms, alone (as in tasks) and numbered."""
    most: defaultdict[str, int] = defaultdict(int)
    for room in {room.name: room for task_type in TaskType for room in rooms_of(task_type)}.values():
        for kind, (_, number) in room.counts(size).items():
            most[kind] = max(most[kind], number)
        for kind in (*room.objects, *filter(None, (room.lamp,))):
            most[kind] = max(most[kind], *COPIES[size])
    for kind, number in sorted(most.items()):
        yield kind.lower()
        yield from (f"{kind.lower()} {i}" for i in range(1, number + 1))


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


@dataclass(frozen=True)
class SplitFolder:
    """Folder of the games of one split."""

    path: Path
    """Path, such as ``…/json_2.1.2/valid_seen``."""
    elsewhere: tuple[Path, ...] = ()
    """The same split of other releases, for a missing ``traj_data.json``."""
    published: bool = False
    """Whether its parent is named like a release, so that all of its games should be there."""


def find_data_folder(data_dir: str | Path | None) -> tuple[Path, str]:
    """Return where official games are looked for, and why there; the folder need not exist."""
    named = os.environ.get("ALFWORLD_DATA", "").strip()
    if data_dir is not None:
        return Path(os.path.expanduser(data_dir)).absolute(), "data_dir"
    if named:
        return Path(os.path.expanduser(named)).absolute(), "$ALFWORLD_DATA"
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


def _make_task(name: str, split: str, number: str, record: GameRecord, text: TaskText, path: str) -> Task:
    return Task(
        id=f"{name}/{split}/{number}",
        split=split,
        subtask=name_subtask(record.task_type) or "unknown",
        instruction=record.human if text is TaskText.HUMAN else record.sentence,
        # Not of the file's bytes, which differ between releases and copies of the same game.
        content={"path": path, "problem": record.problem or record.sha256},
    )


class _FileTaskSet(ListTaskSet):
    """Tasks that are game files."""

    def __init__(self, name: str, split: str, tasks: Sequence[Task], games: Sequence[GameFile]) -> None:
        super().__init__(tasks, name=name, split=split, digest=lambda task: task.content["problem"])
        self.games = tuple(games)

    def _definition(self) -> Any:
        """Return the tasks, and the rules and words that they are played in."""
        rules = sorted({game.record.rules for game in self.games if game.record is not None})
        return {"tasks": super()._definition(), "rules": rules}

    def source(self, task: Task) -> GameSource:
        """Return the game file of a task of this set."""
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
        super().__init__(name, split, tasks, [GameFile(folder.path / one.path, one, text) for one in listing.games])
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
    path = Path(os.path.expanduser(path)).absolute()
    if path.is_dir():
        raise SpearError(f"game={str(path)!r} is a folder: name the {GAME_FILE} in it.")
    return _make_file_set(path, GameFile(path).key, text)


# With the state of the file, so that a changed one is read again.
@lru_cache(maxsize=256)
def _make_file_set(path: Path, state: Hashable, text: TaskText) -> _FileTaskSet:
    record = read_record(path, path.with_name(TRAJECTORY_FILE), f"{path.parent.parent.name}/{path.parent.name}/.")
    game = GameFile(path, record, text)
    game.read()
    task = _make_task("alfworld", "game", record.sha256[:16], record, text, path.name)
    return _FileTaskSet("alfworld", "game", [task], [game])


SPLITS = ("train", "valid_seen", "valid_unseen")
"""Splits of both data sets: rooms to train in, the same rooms with other objects, and unknown rooms."""
GAME_SPLITS = ("game",)
"""The only split of a task set of one game."""


class Dataset(str, Enum):
    """Which games are played."""

    EMBEDDED = "embedded"
    """Synthetic games, made when they are played, without a download."""
    OFFICIAL = "official"
    """The published games, which ``spear data get alfworld`` fetches."""


class GameTaskSet(Protocol):
    """A :class:`TaskSet` with the games of its tasks, from ``make_task_set``."""

    def source(self, task: Task) -> GameSource:
        """Return the source of the game of a task of this set."""


def make_task_set(
    dataset: str = "embedded",
    split: str = "train",
    *,
    rooms: str = "standard",
    data_dir: str | Path | None = None,
    game: str | Path | None = None,
    task_text: str = "template",
) -> TaskSet:
    """Make the task set of an environment, which is also a :class:`GameTaskSet`; equal arguments give the same object.

    Args:
        dataset: ``"embedded"`` or ``"official"``.
        split: one of :data:`SPLITS`; unused with ``game``, whose split is ``"game"``.
        rooms: ``"standard"`` (16 to 40 receptacles) or ``"small"`` (9 to 15 and fewer objects, for tiny policies: one
            can be searched within 20 turns). Embedded games only.
        data_dir: folder of the official games: the one with ``json_2.1.2`` or ``json_2.1.1`` in it, or with the
            split folders. By default ``$ALFWORLD_DATA``, else the user's cache.
        game: path of one ``game.tw-pddl``: the set is exactly this game.
        task_text: ``"template"``, or ``"human"`` for the first sentence that a person wrote (official games only).

    Raises:
        SpearError: a keyword has an invalid value or does not fit the others, there are no data, or a game file cannot
            be read.
    """
    chosen = choose_member(Dataset, dataset, "dataset")
    size = choose_member(RoomSize, rooms, "rooms")
    text = choose_member(TaskText, task_text, "task_text")
    if game is not None:
        check_split(split, (*SPLITS, *GAME_SPLITS))
        return make_file_set(Path(game), text)
    check_split(split, SPLITS)
    if chosen is Dataset.OFFICIAL:
        if size is not RoomSize.STANDARD:
            raise SpearError(f"rooms={rooms!r} is for dataset='embedded': the rooms of official games are fixed.")
        return make_official_set(data_dir, split, text)
    if data_dir is not None:
        raise SpearError("data_dir is for dataset='official': pass that too, or leave data_dir out.")
    if text is not TaskText.TEMPLATE:
        raise SpearError("task_text='human' is for dataset='official': synthetic games lack human texts.")
    return _make_embedded(split, size)


_make_embedded = lru_cache(maxsize=8)(EmbeddedTaskSet)
"""A set caches its tasks, so all environments of a process share one."""
