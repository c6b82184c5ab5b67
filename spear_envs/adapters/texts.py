"""Episodes in text, for libraries whose environments exchange chat messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from spear_envs.adapters.conversation import Message, make_conversation
from spear_envs.core.errors import EnvFault, SpearError, require_whole
from spear_envs.core.making import make_env

COLUMN = "spear"
"""Column of a data set that identifies the episode."""


class TextEpisode:
    """An environment whose messages are texts; a response is the complete output of the model.

    Raises:
        SpearError: the environment is unknown or does not take these keywords.
    """

    def __init__(self, env_id: str, template: str = "default", **keywords: Any) -> None:
        self.env_id = env_id
        self.conversation = make_conversation(env_id, template, **keywords)
        self.last: Message | None = None
        self._lock = threading.Lock()

    def begin(self, task: str | None = None, seed: int | None = None) -> str:
        """Begin an episode; returns the model's first message.

        Raises:
            SpearError: the task is unknown, or the environment shows pictures.
            EnvFault: a service that the task needs is down.
        """
        self.last = self.conversation.reset(task=task, seed=seed)
        if self.last.image is not None:
            text = "shows pictures, but this adapter is for texts: make it with modality='text'."
            raise SpearError(f"{self.env_id} {text}")
        return self.last.text

    def respond(self, response: str) -> Message:
        """Play a response.

        Raises:
            ResetNeeded: no episode is under way.
        """
        with self._lock:  # concurrent requests are possible
            self.last = self.conversation.respond(response)
            return self.last

    def respond_or_raise(self, response: str) -> Message:
        """Play a response, for libraries that drop an episode which raises.

        Raises:
            EnvFault: a service failed, so the episode must not be trained on.
            ResetNeeded: no episode is under way.
        """
        message = self.respond(response)
        if message.info["fault"] is not None:
            raise EnvFault(message.info["fault"])
        return message

    def describe(self) -> dict[str, Any]:
        """Describe the state of the episode in plain values; empty before the first one."""
        if self.last is None:
            return {}
        info = self.last.info
        return {
            "task": info["task_id"],
            "turn": int(info["turn"]),
            "won": bool(info["won"]),
            "score": float(info["score"]),
            "terminated": self.last.terminated,
            "truncated": self.last.truncated,
            "fault": info["fault"],
        }

    def close(self) -> None:
        """Close the environment."""
        self.conversation.env.close()


def join_thought(thought: str | None, text: str) -> str:
    """Restore a response that a library or server split into a thought and the rest."""
    if not thought:
        return text
    # Set apart as a native thought, where the rest has the thought that the prompt asks for.
    return f"<think>\n{thought}\n</think>\n\n{text}" if "<think>" in text else f"<think>{thought}</think>{text}"


def draw_tasks(env_id: str, count: int, *, seed: int = 0, **keywords: Any) -> list[str]:
    """Draw ids of different tasks of an environment's split by ``seed``; at most all of them.

    Raises:
        SpearError: ``count`` or ``seed`` is not a whole number of at least 0, or the environment cannot be made.
    """
    count, seed = require_whole("count", count, 0), require_whole("seed", seed, 0)
    env = make_env(env_id, keywords=keywords)
    tasks = env.tasks
    places = np.random.default_rng(seed).choice(len(tasks), size=min(count, len(tasks)), replace=False)
    ids = [tasks[int(place)].id for place in places]
    env.close()
    return ids


def write_rows(env_id: str, count: int, *, seed: int = 0, **keywords: Any) -> list[dict[str, Any]]:
    """Write rows for :func:`open_row`, for tasks from :func:`draw_tasks`."""
    tasks = draw_tasks(env_id, count, seed=seed, **keywords)
    # As JSON, since a parquet file cannot hold an empty object.
    return [{COLUMN: {"env_id": env_id, "task": task, "keywords": json.dumps(keywords)}} for task in tasks]


def open_row(row: Mapping[str, Any]) -> tuple[TextEpisode, str]:
    """Make the environment of a row; return it, not begun yet, and the task id.

    Raises:
        SpearError: the row is malformed, or the environment is unknown.
    """
    named = row.get(COLUMN)
    if not isinstance(named, Mapping) or not all(isinstance(named.get(key), str) for key in ("env_id", "task")):
        raise SpearError(f"a row has a column {COLUMN!r} with env_id and task: make_rows of this adapter writes it.")
    try:
        keywords = json.loads(named.get("keywords") or "{}")
        return TextEpisode(named["env_id"], **keywords), named["task"]
    except (TypeError, ValueError, RecursionError) as error:
        raise SpearError(
            f"the keywords of a row are a JSON object, not {named.get('keywords')!r} ({error})."
        ) from error
