"""Game files: what they hold, which belong to a split, and the parsed games that environments share."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.grammar import WORDING_2_1_2, read_wording, replace_sentence, split_grammar
from spear_envs.alfworld.pddl import GameError
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.data import data_folder
from spear_envs.data.files import digest_file, read_regular, write_text


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
        """Return the ``game.tw-pddl``, or None if there is no file."""

    def read(self) -> GameText:
        """Read the game.

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
        """Return the short name in reports, such as ``pick2``."""
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
    """Return the short name of ALFRED's ``task_type``; an unknown type keeps its own name."""
    try:
        return TaskType(task_type).subtask
    except ValueError:
        return task_type


CACHED_GAMES = 256
"""Parsed games that a process keeps, least recently used dropped first; each takes about 0.2 MB."""

_TEXTS = ("pddl_domain", "grammar", "pddl_problem")


class WordingChoice(str, Enum):
    """The origin of a game's wording."""

    FILE = "file"
    """The wording of its own grammar."""
    RELEASE_2_1_2 = "2.1.2"
    """The wording of release 2.1.2, whatever the file says: ``move … to``, ``You arrive at drawer 2.``, ``help``."""


GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"
_EXCLUDED = ("movable", "Sliced")
_TYPES = frozenset(kind.value for kind in TaskType)
_VERSION = 2
"""Version of the cached records; others are ignored."""


class LeftOut(str, Enum):
    """A reason why a game in the folder of a split does not belong to it, by alfworld's rules."""

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
    """Path of the game relative to the folder of its split, with slashes."""
    sha256: str
    """SHA-256 (hex) of the game file."""
    task_type: str = ""
    """ALFRED's name of the task type; empty if it is not known."""
    sentence: str = ""
    """The task in the game's words."""
    human: str = ""
    """The first sentence that a person wrote about it; may be empty."""
    left_out: LeftOut | None = None
    """Reason why it does not belong to its split; None if it does."""
    fault: str = ""
    """Reason why it cannot be played. It keeps its place in the split, so that others keep their numbers."""
    problem: str = ""
    """SHA-256 (hex) of ``pddl_problem``, which names the game in every release; empty if the file is broken."""
    rules: str = ""
    """SHA-256 (hex) of domain and grammar without the task sentence, which all games of a release share."""


@dataclass(frozen=True)
class Listing:
    """The games found in the folder of a split."""

    games: tuple[GameRecord, ...]
    """The games of the split, sorted by path; the number of a task is its place here."""
    left_out: Mapping[LeftOut, int]
    """Numbers of games that were left out, by reason."""


class TaskText(str, Enum):
    """The origin of the wording of tasks."""

    TEMPLATE = "template"
    """The templates of ALFWorld, as in the published games."""
    HUMAN = "human"
    """The first sentence that a person wrote about the task, from ``traj_data.json``."""


@dataclass(frozen=True, slots=True)
class GameFile:
    """A ``game.tw-pddl`` that is read when it is played; a :class:`GameSource`."""

    path: Path
    record: GameRecord | None = None
    """Record that the file must still agree with; None for any content."""
    text: TaskText = TaskText.TEMPLATE
    """Origin of the task's wording; a human sentence comes from the record."""

    def __str__(self) -> str:
        return str(self.path)

    @property
    def key(self) -> Hashable:
        """Return the path, modification time and size of the file, and who worded the task.

        Raises:
            GameError: the file is gone.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise GameError(f"{self.path} cannot be read ({error.strerror}): name an existing game.tw-pddl.") from None
        return str(self.path), status.st_mtime_ns, status.st_size, self.text

    def read(self) -> GameText:
        """Read the game.

        Raises:
            GameError: the file cannot be read, is broken, lacks a human sentence if that is wanted, or has changed.
        """
        text, record = read_game_file(self.path), self.record
        if record is None:
            return text
        if digest_file(self.path) != record.sha256:
            raise GameError(f"{self.path} has changed since the task set was made: make a new environment.")
        if self.text is TaskText.HUMAN:
            if not record.human:
                fault = record.fault or "nobody wrote one"
                raise GameError(f"{self.path} has no human task text ({fault}): use task_text='template'.")
            assert text.grammar is not None
            text = replace(text, sentence=record.human, grammar=replace_sentence(text.grammar, record.human))
        return replace(text, task_type=record.task_type)


def read_game_file(path: str | Path) -> GameText:
    """Read a ``game.tw-pddl``; ``solvable`` and ``walkthrough`` do not matter for playing.

    Raises:
        GameError: the file cannot be read, is not a JSON object, or lacks a part; the message names file and fault.
    """
    return make_text(read_game_json(path), path)


def read_game_json(path: str | Path) -> dict[str, Any]:
    """Read the JSON object of a ``game.tw-pddl``; raises as :func:`read_game_file`."""
    try:
        data = json.loads(read_regular(path))
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
    place = str(folder.resolve())
    key = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cache = data_folder() / "cache" / f"alfworld-{key}.json"
    old, new = _read_cache(cache, place), dict[str, list[Any]]()
    games: list[GameRecord] = []
    left_out: Counter[LeftOut] = Counter()
    for name, game, trajectory in walk(folder, elsewhere):
        excluded = any(word in name for word in _EXCLUDED)
        if excluded or game is None or trajectory is None:
            reason = LeftOut.NO_GAME if game is None else LeftOut.NO_TRAJECTORY
            left_out[LeftOut.KIND if excluded else reason] += 1
            continue
        stamp = [game.st_size, game.st_mtime_ns, trajectory[1].st_size, trajectory[1].st_mtime_ns]
        record = _find_cached(old, name, stamp) or read_record(folder / name, trajectory[0], name)
        new[name] = [stamp, *astuple(record)[1:]]
        if record.left_out is None:
            games.append(record)
        else:
            left_out[record.left_out] += 1
    if new != old:
        with suppress(SpearError):  # a full or read-only disk does not matter
            write_text(cache, json.dumps({"version": _VERSION, "folder": place, "games": new}), synced=False)
    games.sort(key=lambda record: record.path)
    return Listing(tuple(games), dict(left_out))


def _read_cache(path: Path, folder: str) -> dict[str, list[Any]]:
    try:
        data = json.loads(read_regular(path, 2**30))
        return data["games"] if (data["version"], data["folder"]) == (_VERSION, folder) else {}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}


def _find_cached(records: Mapping[str, list[Any]], name: str, stamp: Sequence[int]) -> GameRecord | None:
    """Return the cached record of a game whose files have not changed, or None."""
    try:
        old, digest, task_type, sentence, human, left_out, fault, problem, rules = records[name]
        reason = None if left_out is None else LeftOut(left_out)
        record = GameRecord(name, digest, task_type, sentence, human, reason, fault, problem, rules)
        return record if old == stamp else None
    except (KeyError, ValueError, TypeError):
        return None


def walk(
    folder: Path, elsewhere: Sequence[Path] = ()
) -> Iterator[tuple[str, os.stat_result | None, tuple[Path, os.stat_result] | None]]:
    """Yield the path of the game and the state of both files for each folder with a game or a trajectory.

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
        rules = data["pddl_domain"] + split_grammar(data["grammar"])[1]
        problem, rules = (_digest_text(text) for text in (data["pddl_problem"], rules))
    except OSError as error:
        return GameRecord(name, digest, task_type, fault=f"it cannot be read ({error.strerror})")
    except GameError as error:
        return GameRecord(name, digest, task_type, human=human, fault=str(error).removeprefix(f"{path} "))
    solvable = data.get("solvable")
    left_out = LeftOut.UNMARKED if solvable is None else None if solvable is True else LeftOut.UNSOLVABLE
    if task_type not in _TYPES:
        left_out = LeftOut.TYPE
    return GameRecord(name, digest, task_type, sentence, human, left_out, fault, problem, rules)


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read_trajectory(path: Path) -> tuple[str, str, str]:
    """Return the task type, the first sentence of a person, and the fault of the file."""
    try:
        data = json.loads(read_regular(path))
        task_type = data["task_type"]
        sentences = [note["task_desc"].strip() for note in data.get("turk_annotations", {}).get("anns", [])]
        if not isinstance(task_type, str):
            raise TypeError
    except OSError as error:
        return "", "", f"its {path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return "", "", f"its {path.name} is broken: unpack the archive again"
    return task_type, next(filter(None, sentences), ""), ""
