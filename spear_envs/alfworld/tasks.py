"""ALFWorld's task sets: the embedded games, the official ones, or one game file."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from spear_envs.alfworld.embedded import EmbeddedTaskSet
from spear_envs.alfworld.official import TaskText, make_file_set, make_official_set
from spear_envs.alfworld.sources import GameSource
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import Task, TaskSet, check_split

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
