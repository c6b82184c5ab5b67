"""Environments for training with tinker (the package ``tinker-cookbook``): a data set of groups of episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset

from spear_envs.adapters.texts import TextEpisode, draw_tasks, join_thought


class TinkerEnv(MessageEnv):
    """One episode as messages. A fault raises, so that tinker's rollout strategies drop or retry the episode."""

    def __init__(self, episode: TextEpisode, task: str) -> None:
        self._episode = episode
        self._task = task
        self._messages: list[Message] = []

    async def initial_observation(self) -> list[Message]:
        """Begin the episode.

        Raises:
            EnvFault: a service that the task needs is down.
        """
        first = await asyncio.to_thread(self._episode.begin, self._task)
        self._messages = [Message(role="user", content=first)]
        return list(self._messages)

    async def step(self, message: Message) -> MessageStepResult:
        """Play a response.

        Raises:
            EnvFault: a service failed.
        """
        said = await asyncio.to_thread(self._episode.respond_or_raise, _write_response(message))
        self._messages += [message, Message(role="user", content=said.text)]
        about = self._episode.describe()
        return MessageStepResult(
            reward=said.reward,
            episode_done=said.done,
            next_messages=list(self._messages),
            metrics={"won": float(about["won"]), "score": about["score"]} if said.done else {},
            logs={"task": about["task"], "turn": about["turn"]},
        )

    def close(self) -> None:
        """Close the environment."""
        self._episode.close()


def _write_response(message: Message) -> str:
    """Restore what the model wrote: renderers split off thoughts and tool calls, but environments parse them."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    thought = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
    texts = [part["text"] for part in parts if part["type"] == "text"]
    for call in message.get("tool_calls", []):
        written = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        texts.append(f"<tool_call>\n{json.dumps(written)}\n</tool_call>")
    texts += [call.raw_text for call in message.get("unparsed_tool_calls", [])]
    return join_thought(thought, "".join(texts))


@dataclass(frozen=True)
class TinkerGroup(EnvGroupBuilder):
    """Episodes of one task, whose advantages are compared."""

    env_id: str
    task: str
    group_size: int
    renderer: Renderer
    keywords: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of tinker's ``EnvFromMessageEnv``, such as ``max_trajectory_tokens``."""
    _open: list[TinkerEnv] = field(default_factory=list, compare=False)

    async def make_envs(self) -> Sequence[Env]:
        """Make an environment for each member of the group."""
        made = [TinkerEnv(TextEpisode(self.env_id, **self.keywords), self.task) for _ in range(self.group_size)]
        self._open.extend(made)
        return [EnvFromMessageEnv(self.renderer, env, **self.limits) for env in made]

    async def cleanup(self) -> None:
        """Close the environments."""
        while self._open:
            self._open.pop().close()

    def logging_tags(self) -> list[str]:
        """Return the environment's id."""
        return [self.env_id]


class TinkerDataset(RLDataset):
    """Batches of groups, for tinker's ``train.Config(dataset_builder=…)``.

    Args:
        batch_size: groups in a batch.
        group_size: episodes of a group.
        count: number of different tasks.
    """

    def __init__(
        self,
        env_id: str,
        renderer: Renderer,
        *,
        batch_size: int,
        group_size: int,
        count: int,
        seed: int = 0,
        limits: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self._batch_size = batch_size
        self._groups = [
            TinkerGroup(env_id, task, group_size, renderer, keywords, limits or {})
            for task in draw_tasks(env_id, count, seed=seed, **keywords)
        ]

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return the groups of a batch."""
        return self._groups[index * self._batch_size : (index + 1) * self._batch_size]

    def __len__(self) -> int:
        """Return the number of full batches."""
        return len(self._groups) // self._batch_size
