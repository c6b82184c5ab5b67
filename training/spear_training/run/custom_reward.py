"""A user's own reward function instead of the environment's outcome, with verl's interface.

``reward.function`` names it as ``FILE.py:FUNCTION``, and ``reward.function_options`` has further keywords::

    def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | {"score": float, ...}

It may be a coroutine function. Plain functions run in threads, several at a time.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import import_file
from spear_envs.core.tasks import Task, TaskSet
from spear_training.algorithms.settings import RewardSettings

CUSTOM = "custom"
"""Reward term with the function's score, which replaces the outcome."""
ANSWERS = ("answer", "golden_answers")
"""Fields of a task's content with its expected answer: a text, or a list of accepted texts."""
LARGEST = 2.0**63
"""Largest size of a score: advantages are float32, where the square of a larger one is infinite."""
DEFAULT = "compute_score"
"""Name of the function, unless another is given."""
SLOW = 60.0
"""Seconds of a call after which the training's log names it: nothing ends a function that never returns."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CustomReward:
    """The function ``name`` of the file ``path``, called with ``kwargs`` besides verl's four arguments."""

    path: Path
    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The function as ``reward.function`` names it, with an absolute path: workers run in other folders."""
        return f"{self.path}:{self.name}"

    async def score_all(self, trajectories: Sequence[Trajectory], tasks: TaskSet, split: str) -> list[Trajectory]:
        """Add the score :data:`CUSTOM` to the episodes, except those cut short by a fault.

        Raises SpearError, with file, line and task, if the function failed or did not return a finite number.
        """
        return list(await asyncio.gather(*(self._score(episode, tasks, split) for episode in trajectories)))

    async def _score(self, episode: Trajectory, tasks: TaskSet, split: str) -> Trajectory:
        if episode.fault is not None:
            return episode
        # Copies: a function that sorts its answers must not change the task, nor the options of the next call.
        arguments = copy.deepcopy({**describe_episode(episode, tasks.get(episode.task_id), split), **self.kwargs})
        message = "%s has not returned for %g s (task %s); the training waits"
        timer = asyncio.get_running_loop().call_later(SLOW, _log.warning, message, self.place, SLOW, episode.task_id)
        try:
            if inspect.iscoroutinefunction(self.function):
                answer = await self.function(**arguments)
            else:
                answer = await asyncio.to_thread(self._call, arguments)
        except (Exception, SystemExit) as error:
            line = _find_line(error, self.path)  # of the user's file; none if the function was called wrongly
            place = f"line {line.lineno}, in {line.name}" if line else self.name
            raise SpearError(f"{self.path}, {place}: {_describe(error)} (task {episode.task_id})") from error
        finally:
            timer.cancel()
        score: Any = answer.get("score") if isinstance(answer, Mapping) else answer
        try:
            number = float(score)  # also a tensor or a number of numpy
        except Exception:  # whatever the function's own type raises
            number = math.nan
        if not abs(number) <= LARGEST:
            raise SpearError(
                f"{self.path}: {self.name} returned {answer!r:.80} for task {episode.task_id}, which is neither a "
                f"number of at most {LARGEST:g} nor a dict with one under 'score'"
            )
        return replace(episode, reward_terms={**episode.reward_terms, CUSTOM: number})

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.function(**arguments)
        except StopIteration as error:  # would leave whoever waits for the thread waiting for ever
            raise RuntimeError("StopIteration").with_traceback(error.__traceback__) from None


def describe_episode(episode: Trajectory, task: Task, split: str) -> dict[str, Any]:
    """Return the function's arguments for an episode, by verl's names."""
    turns = [
        {"observation": turn.observation, "response": turn.response, "action": turn.action} for turn in episode.turns
    ]
    return {
        "data_source": episode.env_id,
        "solution_str": "\n".join(turn.response for turn in episode.turns),
        "ground_truth": next((task.content[key] for key in ANSWERS if key in task.content), None),
        "extra_info": {
            "task_id": episode.task_id,
            "split": split,
            "reward_terms": dict(episode.reward_terms),
            "won": episode.won,
            "num_turns": len(turns),
            "turns": turns,
        },
    }


def load_custom_reward(settings: RewardSettings) -> CustomReward | None:
    """Load the function that ``reward.function`` names, if it does.

    Raises SpearError if the file or the function does not exist, or the file cannot be loaded.
    """
    place = settings.function
    if place is None:
        if settings.function_options:
            raise SpearError("reward.function_options needs reward.function=FILE.py:FUNCTION")
        return None
    file, _, name = place.removeprefix("file://").rpartition(":")
    if not name.isidentifier():
        file, name = place, DEFAULT
    path = Path(os.path.expanduser(file)).resolve()
    if not path.is_file():
        raise SpearError(f"reward.function={place}: {path} is not a file; name FILE.py:FUNCTION")
    return CustomReward(path, name, _load_function(path, name), settings.function_options)


def _load_function(path: Path, name: str) -> Callable[..., Any]:
    try:
        module = import_file(path, f"custom_reward_{path.stem}")
    except Exception as error:
        line = _find_line(error, path)
        where = f", line {line.lineno}" if line else ""
        raise SpearError(f"{path}{where} cannot be loaded: {_describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SpearError(f"{path} has no function {name!r}: name it as reward.function=FILE.py:FUNCTION")
    return function


def _find_line(error: BaseException, path: Path) -> traceback.FrameSummary | None:
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
