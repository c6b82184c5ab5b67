"""Sokoban's task sets: generated training levels, fixed held-out lists, or one level given by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

from spear_envs.core.tasks import GeneratedTaskSet, ListTaskSet, Task, TaskSet
from spear_envs.sokoban.generate import Recipe, draw_held_out, make_level
from spear_envs.sokoban.levels import (
    Level,
    LevelError,
    SplitBy,
    digest_level,
    digest_room,
    find_band,
    parse_level,
    read_xsb,
)
from spear_envs.sokoban.search import find_solution

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


# Task sets depend on the recipe alone and take up to half a second, so each is cached.
@lru_cache(maxsize=8)
def _list_held_out(recipe: Recipe) -> dict[str, list[Level]]:
    return draw_held_out(recipe, HELD_OUT_LENGTH)


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
    """Make a task set of one level, given by its rows, also in XSB; its id has a digest of them.

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
