"""Sessions and their environments: bounded in number, for one client at a time, and reused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from spear_envs.adapters.conversation import Conversation, Message
from spear_envs.adapters.openenv.wire import ErrorCode, Reset, WireError
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task, TaskSet

logger = logging.getLogger(__name__)

_SHOWN = 1000
"""Characters of an error, which may repeat what the client sent."""
MakeConversation = Callable[[str | None], Conversation]
"""Makes an environment for a split; None for the server's own."""


class SessionPool:
    """Admits sessions and lends environments; from any thread.

    Args:
        max_sessions: at a time; each holds at most one environment.
    """

    def __init__(self, make: MakeConversation, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.active = 0
        self._make = make
        self._lock = threading.Lock()
        self._idle: dict[str | None, list[Conversation]] = {}
        """By splits that exist: a client can name any others."""

    def open(self) -> Session:
        """Open a session.

        Raises:
            WireError: all sessions are taken.
        """
        with self._lock:
            if self.active >= self.max_sessions:
                raise WireError(
                    ErrorCode.CAPACITY_REACHED,
                    f"all {self.max_sessions} sessions are taken: close one, or raise --max-sessions of the server.",
                )
            self.active += 1
        return Session(self)

    def leave(self) -> None:
        """Note that a session has ended."""
        with self._lock:
            self.active -= 1

    def lend(self, split: str | None) -> Conversation:
        """Lend an environment of a split, reused from an ended session or new.

        Raises:
            WireError: it cannot be made.
        """
        with self._lock:
            if self._idle.get(split):
                return self._idle[split].pop()
        try:
            return self._make(split)
        except SpearError as error:
            raise WireError(ErrorCode.FACTORY_ERROR, str(error)[:_SHOWN]) from None

    def take_back(self, split: str | None, conversation: Conversation) -> None:
        """Keep an environment for the next session, unless enough are kept."""
        with self._lock:
            if sum(map(len, self._idle.values())) < self.max_sessions:
                self._idle.setdefault(split, []).append(conversation)
                return
        conversation.env.close()

    def close(self) -> None:
        """Close the idle environments."""
        for idle in self._idle.values():
            while idle:
                idle.pop().env.close()

    def read_tasks(self, split: str | None, read: Callable[[TaskSet], Any]) -> Any:
        """Return ``read`` of the tasks of a split.

        Raises:
            WireError: the split is unknown.
        """
        conversation = self.lend(split)
        try:
            return read(conversation.env.tasks)
        finally:
            self.take_back(split, conversation)

    def list_splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        conversation = self.lend(None)
        try:
            return conversation.env.splits
        finally:
            self.take_back(None, conversation)


class Session:
    """One client's episode. Its methods block and are called one after the other."""

    def __init__(self, pool: SessionPool) -> None:
        self.episode_id: str | None = None
        self._pool = pool
        self._split: str | None = None
        self._conversation: Conversation | None = None
        self._last: Message | None = None

    def reset(self, request: Reset) -> Message:
        """Begin an episode.

        Raises:
            WireError: the split or task is unknown, or a service of the environment is down.
        """
        if self._conversation is None or request.split != self._split:
            self._give_back()
            self._conversation = self._pool.lend(request.split)
            self._split = request.split
        conversation = self._conversation
        self._last = None
        task = request.task
        if request.index is not None:
            tasks = conversation.env.tasks
            if request.index >= len(tasks):
                raise WireError(
                    ErrorCode.EXECUTION_ERROR, f"there is no task {request.index}: the split has {len(tasks)}."
                )
            task = tasks[request.index].id
        self.episode_id = request.episode_id
        self._last = self._run(lambda: conversation.reset(task=task, seed=request.seed))
        return self._last

    def step(self, response: str) -> Message:
        """Play a response.

        Raises:
            WireError: no episode is under way.
        """
        conversation = self._conversation
        if conversation is None or self._last is None or self._last.done:
            state = "has begun" if self._last is None else "is under way any more"
            raise WireError(ErrorCode.EXECUTION_ERROR, f"no episode {state}: send reset first.")
        self._last = self._run(lambda: conversation.respond(response))
        return self._last

    def describe(self) -> dict[str, Any]:
        """State of the episode for OpenEnv's clients."""
        info = self._last.info if self._last else {}
        return {
            "episode_id": self.episode_id,
            "step_count": info.get("turn", 0),
            "task_id": info.get("task_id"),
            "done": self._last is None or self._last.done,
        }

    def close(self) -> None:
        """Give the environment and the place back."""
        self._give_back()
        self._pool.leave()

    def _run(self, play: Callable[[], Message]) -> Message:
        try:
            return play()
        except SpearError as error:
            raise WireError(ErrorCode.EXECUTION_ERROR, str(error)[:_SHOWN]) from None
        except Exception as error:
            logger.exception("an environment failed")
            self._conversation = self._last = None  # its state is unknown
            raise WireError(ErrorCode.EXECUTION_ERROR, f"the environment failed: {type(error).__name__}.") from error

    def _give_back(self) -> None:
        if self._conversation is not None:
            self._pool.take_back(self._split, self._conversation)
            self._conversation = None


def describe_task(task: Task, index: int) -> dict[str, Any]:
    """Describe a task without its content, which may hold the answer."""
    return {"id": task.id, "index": index, "subtask": task.subtask, "instruction": task.instruction}
