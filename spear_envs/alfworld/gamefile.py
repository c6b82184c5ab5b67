"""Games and where they come from: task types, sources, official files, and the parsed games that environments share."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.grammar import WORDING_2_1_2, read_wording, split_grammar
from spear_envs.alfworld.pddl import GameError
from spear_envs.core.errors import SpearError, suggest_name


@dataclass(frozen=True, slots=True)
class GameText:
    """Everything that defines one game."""

    problem: str
    """The PDDL problem: objects, initial facts, goal."""
    sentence: str
    """The task, such as ``put a hot apple in fridge.``; follows ``Your task is to: ``."""
    grammar: str | None
    """TextWorld's grammar, with the wording; None for that of release 2.1.2."""
    domain: str | None
    """The PDDL domain, with the effects of commands; None for that of release 2.1.2."""
    task_type: str
    """ALFRED's name of the task type; empty if it is not known."""


class GameSource(Protocol):
    """A game that is read when it is played."""

    def __hash__(self) -> int: ...

    @property
    def key(self) -> Hashable:
        """Cache key of the parsed game. Cheap; changes if the file changes.

        Raises:
            SpearError: the file is gone.
        """

    @property
    def path(self) -> Path | None:
        """The ``game.tw-pddl``, or None if there is no file."""

    def read(self) -> GameText:
        """The game.

        Raises:
            SpearError: the file is gone or is not a game; the message names file and fault.
        """


class TaskType(str, Enum):
    """A kind of task; the values are ALFRED's names."""

    PICK = "pick_and_place_simple"
    """Put an object of one kind into a receptacle of another."""
    LOOK = "look_at_obj_in_light"
    """Hold an object at a lamp that is switched on."""
    CLEAN = "pick_clean_then_place_in_recep"
    """A clean object in a receptacle."""
    HEAT = "pick_heat_then_place_in_recep"
    """A hot object in a receptacle."""
    COOL = "pick_cool_then_place_in_recep"
    """A cool object in a receptacle."""
    PICK2 = "pick_two_obj_and_place"
    """Two objects of one kind in the same receptacle."""

    @property
    def subtask(self) -> str:
        """The short name in reports, such as ``pick2``."""
        return self.name.lower()


SUBTASKS: tuple[str, ...] = tuple(kind.subtask for kind in TaskType)
"""``pick look clean heat cool pick2``, in the order of the paper's table."""


def find_task_type(name: str) -> TaskType:
    """Find a task type by ALFRED's name or the short one.

    Raises:
        SpearError: the name is unknown; the message lists all.
    """
    for kind in TaskType:
        if name in (kind.value, kind.subtask):
            return kind
    names = [kind.value for kind in TaskType]
    raise SpearError(
        f"task_type={name!r} is not valid: choose one of {', '.join(map(repr, names))}, or one of the short names"
        f" {', '.join(SUBTASKS)}.{suggest_name(str(name), [*names, *SUBTASKS])}"
    )


def name_subtask(task_type: str) -> str:
    """Short name of ALFRED's ``task_type``; an unknown type keeps its own name."""
    try:
        return TaskType(task_type).subtask
    except ValueError:
        return task_type


CACHED_GAMES = 256
"""Parsed games that a process keeps, least recently used dropped first; each takes about 0.2 MB."""

_TEXTS = ("pddl_domain", "grammar", "pddl_problem")


class WordingChoice(str, Enum):
    """Whose wording a game uses."""

    FILE = "file"
    """That of its own grammar."""
    RELEASE_2_1_2 = "2.1.2"
    """That of release 2.1.2, whatever the file says: ``move … to``, ``You arrive at drawer 2.``, ``help``."""


@dataclass(frozen=True, slots=True)
class GameFile:
    """A ``game.tw-pddl`` that is read when it is played; a :class:`GameSource`."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def key(self) -> Hashable:
        """Path, modification time and size.

        Raises:
            GameError: the file is gone.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise GameError(f"{self.path} cannot be read ({error.strerror}): name an existing game.tw-pddl.") from None
        return str(self.path), status.st_mtime_ns, status.st_size

    def read(self) -> GameText:
        """The game; see :func:`read_game_file`."""
        return read_game_file(self.path)


def read_game_file(path: str | Path) -> GameText:
    """Read a ``game.tw-pddl``; ``solvable`` and ``walkthrough`` do not matter for playing.

    Raises:
        GameError: the file cannot be read, is not a JSON object, or lacks a part; the message names file and fault.
    """
    return make_text(read_game_json(path), path)


def read_game_json(path: str | Path) -> dict[str, Any]:
    """Read the JSON object of a ``game.tw-pddl``; raises as :func:`read_game_file`."""
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise GameError(f"{path} cannot be read ({error.strerror}): name an existing game.tw-pddl.") from None
    except (ValueError, RecursionError) as error:
        raise GameError(f"{path} is not JSON ({error}): it may be cut short. Unpack the archive again.") from None
    if not isinstance(data, dict):
        raise GameError(f"{path} is not a game of ALFWorld: it holds a {type(data).__name__} instead of an object.")
    for key in _TEXTS:
        if not isinstance(data.get(key), str):
            state = "no" if key not in data else "not a text in"
            raise GameError(f"{path} is not a game of ALFWorld: it has {state} {key!r}. Unpack the archive again.")
    return data


def make_text(data: Mapping[str, Any], path: str | Path) -> GameText:
    """Extract the game from the JSON object of a ``game.tw-pddl``.

    Raises:
        GameError: it lacks a task sentence; the message begins with ``path``.
    """
    try:
        sentence, _ = split_grammar(data["grammar"])
    except GameError as error:
        raise GameError(f"{path} cannot be played: {error}.") from None
    return GameText(
        problem=data["pddl_problem"],
        sentence=sentence,
        grammar=data["grammar"],
        domain=data["pddl_domain"],
        task_type="",
    )


def make_game(text: GameText, wording: WordingChoice = WordingChoice.FILE) -> Game:
    """Make the game of a text.

    Raises:
        GameError: it is not a game; the message names the fault, not the place.
    """
    chosen = WORDING_2_1_2
    if text.grammar is not None and text.domain is not None:
        # Always read: a game with other rules than ALFWorld's must not be played.
        own = read_wording(split_grammar(text.grammar)[1], text.domain)
        if wording is WordingChoice.FILE:
            chosen = own
    return Game.from_problem(text.problem, text.sentence, chosen)


@lru_cache(maxsize=CACHED_GAMES)
def _load(key: Hashable, source: GameSource, wording: WordingChoice) -> Game:
    text = source.read()
    try:
        return make_game(text, wording)
    except GameError as error:
        raise GameError(f"{source} cannot be played: {error}.") from None


def load_game(source: GameSource, wording: WordingChoice = WordingChoice.FILE) -> Game:
    """Load the game of a source, from the cache of this process if possible.

    Raises:
        GameError: it cannot be read or played; the message names the source and the fault.
    """
    return _load(source.key, source, wording)
