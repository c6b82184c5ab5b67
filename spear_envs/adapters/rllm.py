"""Environments for rLLM: an agent flow that plays an episode at rLLM's address, and its evaluator."""

from __future__ import annotations

import asyncio
from typing import Any

from spear_envs.adapters.texts import TextEpisode, join_thought, open_row, write_rows
from spear_envs.core.errors import SpearError


class RllmFlow:
    """Plays the episode of a task's metadata as one conversation: ``AgentTrainer(agent_flow=RllmFlow())``.

    rLLM's gateway records the tokens. A fault raises, so that rLLM tries the task again.
    """

    name = "spear"
    needs_env = False

    async def arun(self, task: Any, config: Any) -> Any:
        """Play an episode.

        Args:
            task: an ``rllm.types.Task``, or a row of :func:`make_rows`.
            config: an ``rllm.types.AgentConfig``: ``base_url`` and ``model``.

        Returns:
            An ``rllm.types.Episode``, whose steps rLLM fills in; the reward is in its artifacts.

        Raises:
            EnvFault: a service failed.
            SpearError: the metadata do not describe an episode.
        """
        from rllm.types import Episode, Trajectory

        episode, task_id = await asyncio.to_thread(open_row, getattr(task, "metadata", task) or {})
        try:
            paid = await _play(episode, task_id, config)
            about = episode.describe()
            return Episode(trajectories=[Trajectory(name=self.name)], artifacts=about | {"reward": paid})
        finally:
            episode.close()


class RllmEvaluator:
    """Returns the environment's reward: ``AgentTrainer(evaluator=RllmEvaluator())``."""

    def evaluate(self, task: Any, episode: Any) -> Any:
        """Return the reward of an episode of :class:`RllmFlow`, as an ``rllm.eval.types.EvalOutput``.

        Raises:
            SpearError: another flow played it.
        """
        from rllm.eval.types import EvalOutput, Signal

        found = episode.artifacts
        if "reward" not in found:
            raise SpearError("this episode lacks an environment's reward: use RllmEvaluator with RllmFlow.")
        signals = [Signal(name=name, value=float(found[name])) for name in ("won", "score", "turn")]
        return EvalOutput(reward=found["reward"], is_correct=found["won"], signals=signals)


async def _play(episode: TextEpisode, task: str, config: Any) -> float:
    """Play and return the reward; an episode that outgrows the model's context counts as lost."""
    from openai import AsyncOpenAI, BadRequestError

    messages: list[Any] = [{"role": "user", "content": await asyncio.to_thread(episode.begin, task)}]
    total = 0.0
    async with AsyncOpenAI(base_url=config.base_url, api_key="EMPTY") as client:
        while True:
            try:
                reply = await client.chat.completions.create(model=config.model, messages=messages)
            except BadRequestError as error:
                if "context" not in str(error).lower():
                    raise
                assert episode.last is not None
                return episode.conversation.pay(episode.last) or 0.0
            message = reply.choices[0].message
            thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
            response = join_thought(thought, message.content or "")
            said = await asyncio.to_thread(episode.respond_or_raise, response)
            total += said.reward
            if said.done:
                return total
            messages += [{"role": "assistant", "content": response}, {"role": "user", "content": said.text}]


def make_rows(env_id: str, count: int, *, seed: int = 0, **keywords: Any) -> list[dict[str, Any]]:
    """Make rows for rLLM's ``DatasetRegistry.register_dataset``; each becomes a task's metadata."""
    return [{"question": row["spear"]["task"], **row} for row in write_rows(env_id, count, seed=seed, **keywords)]
