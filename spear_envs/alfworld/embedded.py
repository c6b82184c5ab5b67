"""The packaged games: listed by seed and digest, made by the synthesizer when they are played."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.sources import GameSource, GameText
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.placing import COPIES
from spear_envs.alfworld.synthesis.rooms import RoomSize, rooms_of
from spear_envs.alfworld.task_types import TaskType, find_task_type
from spear_envs.core.tasks import NumberedTaskSet, Task

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
