"""ALFWorld's task sets: the embedded games, the official ones, or one game file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from spear_envs.alfworld.gamefile import GameSource, GameText, TaskType, find_task_type
from spear_envs.alfworld.official import TaskText, make_file_set, make_official_set
from spear_envs.alfworld.pddl import GameError
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import COPIES, RoomSize, rooms_of
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import NumberedTaskSet, Task, TaskSet, check_split

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
        """The digest of the content."""
        return self.digest

    @property
    def path(self) -> None:
        """None: ``write_game(source.make(), folder)`` writes a file."""
        return None

    def make(self) -> SyntheticGame:
        """Make the game.

        Raises:
            GameError: the result is not the listed game.
        """
        return _make_listed(self)

    def read(self) -> GameText:
        """Sentence and problem; the same errors as :meth:`make`."""
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
    """Games of a split in the order of their tasks: the six types take turns, so any prefix is balanced."""
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
        """SHA-256 of the game's sentence and problem, without making it."""
        return self._games[range(len(self))[index]].digest

    def _definition(self) -> Any:
        return [{"id": self.id_of(i), **self._content_at(i)} for i in range(len(self))]

    def source(self, task: Task) -> GameSource:
        """Source of the game of a task of this set."""
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
        """Source of the game of a task of this set."""


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
