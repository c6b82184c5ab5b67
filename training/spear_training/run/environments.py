"""Facts about the environment of a training, found by making it once."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from spear_agents.evaluation.run import choose_template
from spear_agents.play.prompting import shows_picture
from spear_agents.play.snapshots import Snapshot
from spear_envs.core.errors import SpearError, require_whole
from spear_envs.core.making import make_env
from spear_envs.core.tasks import choose_subset
from spear_training.algorithms.responses import is_incomplete
from spear_training.run.config import EnvironmentSettings


def make_environment(settings: EnvironmentSettings, *, split: str) -> gym.Env:
    """Make one environment of ``split``. Raises SpearError for an unknown id or an invalid keyword."""
    return make_env(settings.id, split, settings.kwargs)


@dataclass(frozen=True)
class SplitFacts:
    """The tasks of a split, to compare those of two runs."""

    split: str
    tasks: int
    fingerprint: str


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about the environment needed before a training starts."""

    id: str
    max_turns: int
    shows_picture: bool
    """Whether the first prompt has a picture."""
    train: SplitFacts
    valid: SplitFacts
    validated: tuple[str, ...] | None = None
    """Ids of the tasks of a validation; None if it plays all of the split."""
    writes_tags: bool = True
    """Whether the template's responses have a whole ``<action>``."""
    obstacle: str | None = None
    """Why episodes cannot start in a state of another one; None if they can, or it was not checked."""


def inspect_environment(
    settings: EnvironmentSettings, *, valid_tasks: int = -1, branches: bool = False
) -> EnvironmentFacts:
    """Make the environment of each split once and inspect it.

    Args:
        settings: the environment.
        valid_tasks: number of tasks in a validation; negative for all.
        branches: also inspect whether episodes can start in states.

    Raises SpearError if the environment cannot be made, or does not have the template.
    """
    splits, validated = [], None
    for split in (settings.valid_split, settings.train_split):
        made: Any = make_environment(settings, split=split)
        with closing(made) as env:
            template = choose_template(env, settings.template)
            pictures = shows_picture(env, template)
            tags = not is_incomplete(template.respond("look"))
            obstacle = _find_obstacle(env.unwrapped) if branches else None
            splits.append(SplitFacts(split, len(env.tasks), env.tasks.fingerprint))
            max_turns = env.max_turns
            if split == settings.valid_split and 0 <= valid_tasks < len(env.tasks):
                validated = tuple(env.tasks[position].id for position in choose_subset(env.tasks, valid_tasks))
    return EnvironmentFacts(
        settings.id,
        max_turns,
        pictures,
        train=splits[1],
        valid=splits[0],
        validated=validated,
        writes_tags=tags,
        obstacle=obstacle,
    )


def _find_obstacle(env: Any) -> str | None:
    """Return why episodes cannot start in a state of an environment that has just been reset, or None."""
    if not env.restores:
        return "its requests to other processes would have to be repeated"
    try:
        Snapshot.take(env, ()).restore(env)
    except SpearError as error:
        return str(error).rstrip(".")
    return None


def count_turns(settings: EnvironmentSettings) -> int:
    """Turn limit of an environment, which is only made if its keywords do not set the limit."""
    given = settings.kwargs.get("max_turns")
    if given is not None:
        return require_whole("max_turns", given, 1)
    made: Any = make_environment(settings, split=settings.valid_split)
    with closing(made) as env:
        return int(env.unwrapped.max_turns)
