"""Sokoban's task sets: generated training levels, fixed held-out lists, published level files, or one level."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import gymnasium as gym

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import GeneratedTaskSet, ListTaskSet, NumberedTaskSet, Task, TaskSet, check_split
from spear_envs.data.files import read_regular
from spear_envs.data.rows import FileState, look_at
from spear_envs.sokoban.generate import Recipe, draw_held_out, find_solution, make_level
from spear_envs.sokoban.levels import (
    Level,
    LevelError,
    SplitBy,
    digest_level,
    digest_room,
    find_band,
    find_split,
    parse_level,
    read_xsb,
)

VERSION = "sokoban-v1"
"""Prefix of task ids. The prefix ``sokoban`` of ``spear/Sokoban-v0`` had other levels: they were split by the level up
to symmetry alone, and nearly all held-out ones occurred in training, shifted or with the player some steps away."""
TRAIN_LENGTH = 1_000_000
"""Nominal number of training tasks; they are made on demand, and a few repeat."""
OPTIMUM_BUDGET = 200_000
"""States of the search for the optimum of a given level: one to two seconds, and 50 MB."""
HELD_OUT_LENGTH = 256
"""Number of levels in ``valid`` and in ``test`` (fewer only for rooms with too few levels)."""
DEFAULT_FINGERPRINTS = {
    "train": "5a956ba16e5b11043a8460cf9ca262361b1c0125baa62af0865b07e9ac5e392e",
    "valid": "7ec716ac21eb1ad57e68a2a8d7b72f618d9e4289c785ed4f041851ffc1044914",
    "test": "f109a8ab0152c542d4bf2dfb9e0498d8d3ff63254ad2980d565e85dee1a3ada1",
}
"""Fingerprints of the splits under the default settings. They must not change within a version of the id."""


def make_task(name: str, split: str, number: str, level: Level, optimal: int | None) -> Task:
    """Make the task of a level and its optimal number of moves, None if that is unknown."""
    boxes = len(level.boxes)
    return Task(
        id=f"{VERSION}/{name}/{split}/{number}",
        split=split,
        subtask=find_band(optimal),
        instruction="Push the box onto the target." if boxes == 1 else f"Push all {boxes} boxes onto the targets.",
        content={"level": level.text, "optimal": optimal},
    )


def _choose_digest(recipe: Recipe) -> Callable[[Task], str]:
    digest = digest_room if recipe.split_by is SplitBy.ROOM else digest_level
    return lambda task: digest(task.content["level"])


# Task sets depend on the recipe alone and take a second, so each is cached, and the default ones come with the package.
@lru_cache(maxsize=8)
def _list_held_out(recipe: Recipe) -> dict[str, list[Level]]:
    if recipe != Recipe():
        return draw_held_out(recipe, HELD_OUT_LENGTH)
    listed = json.loads(resources.files(__package__).joinpath("held_out.json").read_text("utf-8"))
    return {
        split: [replace(parse_level(text), optimal=optimal) for text, optimal in levels]
        for split, levels in listed.items()
    }


@lru_cache(maxsize=32)
def make_task_set(recipe: Recipe, split: str) -> TaskSet:
    """Make the task set ``train``, ``valid`` or ``test`` of a recipe.

    ``train`` draws its levels on demand and drops those of another split; ``valid`` and ``test`` are fixed lists of
    levels with distinct :func:`digest_level`.

    Raises:
        LevelError: the recipe yields no levels.
    """
    name = recipe.name
    if split != "train":
        levels = _list_held_out(recipe)[split]
        tasks = [make_task(name, split, f"{i:08d}", level, level.optimal) for i, level in enumerate(levels)]
        return ListTaskSet(tasks, name=f"{VERSION}/{name}", split=split, digest=_choose_digest(recipe))

    def make(index: int) -> Task:
        level = make_level(recipe, split, index, split=split)
        return make_task(name, split, f"{index:08d}", level, level.optimal)

    return GeneratedTaskSet(
        f"{VERSION}/{name}", split, TRAIN_LENGTH, make, {"recipe": name}, digest=_choose_digest(recipe)
    )


@lru_cache(maxsize=256)
def make_level_set(text: str) -> TaskSet:
    """Make a task set of one level, given by its rows, also in XSB; its id has their digest.

    Raises:
        LevelError: the level is malformed, already solved or cannot be solved.
    """
    text = text.strip("\r\n").replace("\r", "")
    level = parse_level(read_xsb(text) if set("@$+*.") & set(text) else text)
    optimal = find_optimum(level)
    number = hashlib.sha256(level.text.encode()).hexdigest()[:16]
    name = f"{level.height}x{level.width}-{len(level.boxes)}"
    return ListTaskSet([make_task(name, "level", number, level, optimal)], name=f"{VERSION}/{name}", split="level")


def find_optimum(level: Level) -> int | None:
    """Find the least moves of a level; None if that takes too many states.

    Raises:
        LevelError: the level is already solved or cannot be solved.
    """
    if level.solved:
        raise LevelError("the level is already solved: move a box (X) off its target (O)")
    try:
        solution = find_solution(level, OPTIMUM_BUDGET)
    except LevelError:
        return None
    if solution is None:
        raise LevelError("the level cannot be solved from its start: move the boxes away from dead corners and walls")
    return len(solution)


@lru_cache(maxsize=4_096)
def read_level(text: str) -> Level:
    """Return the cached result of :func:`~spear_envs.sokoban.levels.parse_level`."""
    return parse_level(text)


ALL = "all"
FILE_SPLITS = ("train", "valid", "test", ALL)
_SUFFIXES = (".txt", ".xsb", ".sok")
_ROW = re.compile(r"[ _#@+$*.pPbB0-9|-]+(?<!\d)")
_NUMBER = re.compile(r"\s*;\s*(\d{1,9})\s*")
_RUN = re.compile(r"(\d{1,9})(\D)")


@dataclass(frozen=True)
class FileLevel:
    """One level of a file, in our symbols."""

    number: int
    """Number in a line such as ``; 12`` before it, else its place in the file from 1."""
    source: str
    """File and number, for errors."""
    text: str


def read_file(path: Path) -> list[FileLevel]:
    """Read the levels of a file in order; it may have none.

    Raises:
        LevelError: it has one that is not a level.
        SpearError: it cannot be read.
    """
    try:
        text = read_regular(path).decode("utf-8-sig", "replace")
    except OSError as error:
        raise SpearError(f"{path} cannot be read: {error.strerror}.") from None
    found = list(_find_boards(text.expandtabs()))
    named = [number for number, _ in found if number is not None]
    is_numbered = len(set(named)) == len(found)
    levels = []
    for place, (number, board) in enumerate(found, start=1):
        own = number if is_numbered and number is not None else place
        source = f"{path} level {own}"
        try:
            level = parse_level(read_xsb(board))
            if level.solved:
                raise LevelError("the level is already solved: move a box ($) off its target (.)")
            levels.append(FileLevel(own, source, level.text))
        except LevelError as error:
            raise LevelError(f"{source}: {error}") from None
    return levels


def _find_boards(text: str) -> Iterator[tuple[int | None, str]]:
    """Yield each board with the number in the comment before it."""
    number: int | None = None
    for is_row, group in groupby(text.splitlines(), lambda line: "#" in line and _ROW.fullmatch(line) is not None):
        lines = list(group)
        if not is_row:
            stated = [match[1] for line in lines if (match := _NUMBER.fullmatch(line))]
            number = int(stated[-1]) if stated else None
            continue
        rows = _RUN.sub(lambda run: run[2] * min(int(run[1]), 100), "\n".join(lines)).replace("|", "\n")
        if re.search("[@+pP]", rows):  # else walls that decorate a comment
            yield number, rows
            number = None


def _list_files(path: Path, split: str) -> tuple[list[Path], bool]:
    """Return the files of a split, and whether folders make the splits."""
    if path.is_file():
        return [path], False
    if not path.is_dir():
        raise SpearError(f"levels={os.fspath(path)!r} is neither a file nor a folder.")
    by_folder = any((path / name).is_dir() for name in FILE_SPLITS[:3])
    root = path / split if by_folder and split != ALL else path
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in _SUFFIXES)
    if not files:
        raise SpearError(f"{root} has no level file: it should have some named *.txt, *.xsb or *.sok.")
    return files, by_folder


ENUMERATED = 256
"""Most levels of files that are enumerated, which solves each, some for a second or two."""


class LevelFileSet(NumberedTaskSet):
    """The levels of files, each solved when it is first played; choosing among a few solves them all."""

    def __init__(self, name: str, split: str, levels: list[FileLevel]) -> None:
        super().__init__(f"{VERSION}/{name}", split, len(levels))
        self.bounded = len(levels) <= ENUMERATED
        self._levels = levels
        self.height = max(level.text.count("\n") + 1 for level in levels)
        self.width = max(level.text.index("\n") for level in levels)

    def _make_task(self, index: int) -> Task:
        found = self._levels[index]
        level = parse_level(found.text)
        optimal: int | None = None
        try:
            optimal = find_optimum(level)
        except LevelError as error:
            gym.logger.warn(f"{found.source} cannot be won: {error}")
        return make_task(self.name.removeprefix(f"{VERSION}/"), self.split, f"{index:05d}", level, optimal)

    def digest(self, index: int) -> str:
        """See :class:`~spear_envs.core.tasks.TaskSet`; solves nothing."""
        return digest_level(self._levels[index].text)

    @cached_property
    def _texts(self) -> list[str]:
        return [level.text for level in self._levels]

    def _definition(self) -> Any:
        return self._texts


def make_file_set(path: Path, number: int | None, split: str, split_by: SplitBy) -> LevelFileSet:
    """Make the task set of a file or folder; it is kept for as long as the files do not change.

    Args:
        number: only the level with this number, of a single file.
        split: ``"all"``, or a part: the folder of this name where there are such folders, as in Boxoban, else by
            content as in :func:`~spear_envs.sokoban.levels.find_split`.

    Raises:
        LevelError: a level is malformed or solved, or there are none.
        SpearError: a file cannot be read, or a value is not valid.
    """
    check_split(split, FILE_SPLITS)
    files, by_folder = _list_files(path, split)
    if number is not None and len(files) > 1:
        raise SpearError(f"number={number} needs one file: {path} has {len(files)}.")
    return _make_file_set(path, number, split, None if by_folder or split == ALL else split_by, look_at(files))


@lru_cache(maxsize=8)
def _make_file_set(
    path: Path, number: int | None, split: str, split_by: SplitBy | None, state: FileState
) -> LevelFileSet:
    found = {file: read_file(Path(file)) for file, _ in state}
    levels = [level for those in found.values() for level in those]
    if not levels:
        raise LevelError(f"{path} has no level: write walls as #, boxes as $, targets as . and the player as @")
    for file in (file for file, those in found.items() if not those):  # a readme.txt, say
        gym.logger.warn(f"{file} has no level and is left out")
    name = path.stem
    if number is not None:
        levels = [level for level in levels if level.number == number]
        if not levels:
            raise SpearError(f"number={number!r}: {path} has no such level.")
        name = f"{name}-{number}"
    elif split_by is not None:
        levels = [level for level in levels if find_split(level.text, split_by) == split]
        if not levels:
            raise LevelError(f"the split {split!r} of {path} has no levels: choose split='all'")
    return LevelFileSet(name, split, levels)
