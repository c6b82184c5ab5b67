"""Environments for ``environment_factory`` of TRL's ``GRPOTrainer``: actions are tool calls.

TRL, which only needs a class with methods, is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from spear_envs.adapters.conversation import ENDED, Conversation, Message, find_tools_template
from spear_envs.adapters.texts import draw_tasks
from spear_envs.core.env import SpearEnv
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.core.tools import Tool, write_call

Shown = str | list[dict[str, Any]]


class TrlEnvironment:
    """One rollout's environment: ``reset``, ``get_reward``, and a method for each tool of the environment.

    TRL offers every public method of the class to the model, so there are no others.
    """

    def __init__(self, env: SpearEnv[Any]) -> None:
        self._conversation = Conversation(env, find_tools_template(env))
        self._last: Message | None = None

    def reset(self, task: str | None = None, seed: int | None = None, **_: Any) -> Shown:
        """Begin an episode; the arguments are columns of a row of the data set.

        Returns:
            What TRL appends to the row's last message: task, rules and first observation.

        Raises:
            SpearError: neither task nor seed: the members of a group would play different tasks.
        """
        if task is None and seed is None:
            raise SpearError(
                "the rows of the data set lack a task, so the members of a group would play different ones: "
                "take train_dataset=Dataset.from_list(make_rows(...))."
            )
        self._last = self._conversation.reset(task=task, seed=seed)
        return _show(self._last)

    def get_reward(self) -> float | None:
        """Return the reward of the episode, which counts as lost if the model stopped early.

        Returns:
            None after a fault that was not the model's: TRL then leaves the rollout out of its group's statistics.
        """
        return None if self._last is None else self._conversation.pay(self._last)

    def _play(self, action: str) -> Shown:
        if self._last is None or self._last.done:
            return ENDED
        self._last = self._conversation.respond(action)
        shown = _show(self._last)
        if self._last.done:
            return [*shown, {"type": "text", "text": ENDED}] if isinstance(shown, list) else f"{shown}\n\n{ENDED}"
        return shown


def make_factory(env_id: str, **keywords: Any) -> Callable[[], TrlEnvironment]:
    """Make the factory for ``GRPOTrainer(environment_factory=…)``.

    Args:
        env_id: such as ``spear/Sokoban-v1``, or ``my_package.module:mine/Corridor-v0``.
        keywords: of the environment. A model without vision needs Sokoban's ``modality="text"``.

    Raises:
        SpearError: the environment is unknown, does not take these keywords, or has a tool that no method can be.
    """
    keywords = {"response_format": "plain", **keywords}
    env = make_env(env_id, keywords=keywords)
    try:
        methods = {tool.name: _make_method(tool) for tool in env.tools}
    finally:
        env.close()
    for name in methods:
        if name in ("reset", "get_reward") or name.startswith("_"):
            raise SpearError(f"TRL cannot offer the tool {name!r}: give it a name other than reset, get_reward and _….")
    kind = type(type(env).__name__, (TrlEnvironment,), {"__doc__": TrlEnvironment.__doc__, **methods})

    def make() -> TrlEnvironment:
        made: TrlEnvironment = kind(make_env(env_id, keywords=keywords))
        return made

    return make


def make_rows(env_id: str, count: int, *, seed: int = 0, **keywords: Any) -> list[dict[str, Any]]:
    """Make rows of a data set, one for each task from :func:`draw_tasks`.

    The members of a group get the same row and hence the same task.
    """
    ids = draw_tasks(env_id, count, seed=seed, **keywords)
    return [{"prompt": [{"role": "user", "content": ""}], "task": task} for task in ids]


def _make_method(tool: Tool) -> Callable[..., Shown]:
    """Make a method with the tool's arguments and docstring, from which transformers makes the model's description."""

    def call(self: TrlEnvironment, **arguments: Any) -> Shown:
        return self._play(write_call(self._conversation.env.tools, tool.name, arguments))

    return tool.dress(call, "self")


def _show(message: Message) -> Shown:
    """Return a text, or blocks with the picture at its place in the text."""
    if message.image is None:
        return message.text
    before, _, after = message.text.partition("<image>")
    blocks: list[dict[str, Any]] = [{"type": "text", "text": before}]
    blocks.append({"type": "image", "image": Image.fromarray(message.image)})
    return [*blocks, {"type": "text", "text": after}] if after else blocks
