"""Environments for ``verifiers`` (its v1 interface): a task set, and the environment as the user.

verifiers finds both by the name of a module that exports them: see ``docs/adapters.md``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from spear_envs.adapters.texts import TextEpisode, draw_tasks, join_thought


class SpearTasksetConfig(vf.TasksetConfig):
    """Choice of tasks of an environment."""

    env_id: str = "spear/Sokoban-v1"
    count: int = 64
    """Number of different tasks, drawn by ``seed``; at most all of the split."""
    seed: int = 0
    keywords: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the environment, such as ``{"split": "test", "modality": "text"}``."""


class SpearData(vf.TaskData):
    """A task by its id; the environment has the rest."""

    env_id: str
    keywords: dict[str, Any]


class SpearTask(vf.Task[SpearData]):
    """A task, whose reward :class:`VerifiersEnv` records."""


class VerifiersTaskset(vf.Taskset[SpearTask, SpearTasksetConfig]):
    """Tasks of an environment, ours or yours."""

    def load(self) -> Iterator[SpearTask]:
        """Yield the tasks in the order of the draw."""
        config = self.config
        for task in draw_tasks(config.env_id, config.count, seed=config.seed, **config.keywords):
            data = SpearData(id=task, name=task, prompt=None, env_id=config.env_id, keywords=config.keywords)
            yield SpearTask(data, config.task)


class VerifiersConfig(vf.EnvConfig):
    """The agent that plays: by default verifiers' loop without tools."""

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class VerifiersEnv(vf.Env[VerifiersConfig]):
    """The environment as the user of a conversation."""

    async def run(self, task: SpearTask, agents: Any) -> None:
        """Play an episode, which counts as lost if the agent stops early.

        Raises:
            EnvFault: a service failed; verifiers then retries the episode, or counts it as failed.
        """
        data = task.data
        episode = await asyncio.to_thread(TextEpisode, data.env_id, **data.keywords)
        try:
            first = await asyncio.to_thread(episode.begin, data.id)
            total = 0.0
            async with agents.player.interaction(task) as interaction:
                segment = await interaction.turn(first)
                while not segment.terminated:
                    message = await asyncio.to_thread(episode.respond_or_raise, _write_response(segment))
                    total += message.reward
                    if message.done:
                        break
                    segment = await interaction.turn(message.text)
            last = episode.last
            assert last is not None
            paid = total if last.done else episode.conversation.pay(last) or 0.0
            interaction.trace.record_reward("spear", paid)
            about = episode.describe()
            interaction.trace.record_metrics({key: float(about[key]) for key in ("won", "score", "turn")})
        finally:
            episode.close()


def _write_response(segment: vf.Segment) -> str:
    messages = [message for message in segment.messages if message.role == "assistant"]
    return join_thought(messages[-1].reasoning_content if messages else None, segment.last_reply)
