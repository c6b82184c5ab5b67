"""The one loop that plays an episode.  Evaluation, data collection and training rollouts all call it."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import gymnasium as gym
import numpy as np

from spear_agents.engines.base import (
    ContextExceededError,
    Engine,
    EngineFault,
    EngineFaultKind,
    Generation,
    Sampling,
    derive_seed,
)
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.prompting import Prompt, PromptBuilder
from spear_agents.trajectory import Layout, StopReason, TokenKind, Trajectory, Turn
from spear_envs.core.env import image_of, text_of
from spear_envs.core.errors import SpearError
from spear_envs.core.faults import EnvFault
from spear_envs.core.rewards import compose_reward

BLOCKING_ENVIRONMENTS = 128
"""Environments of a process that wait for a service at the same time; further ones queue."""
UNREAD_ACTION = "(nothing)"
"""What the history shows as the action of a response that could not be read."""


async def play_episode(
    env: gym.Env[Any, Any],
    engine: Engine,
    prompts: PromptBuilder,
    *,
    task_id: str,
    sampling: Sampling,
    seed: int,
    env_id: str,
) -> Trajectory:
    """Plays one episode to its end: observe, build the prompt, generate, step, record.

    Nothing is generated for an episode that has ended.  Turn ``t`` is sampled with a seed derived from the task,
    ``seed`` and
    ``t`` (``sampling.seed`` is not read), so an episode is the same whatever is played beside it.  What a policy
    writes never raises; a fault of the environment or of the engine ends the episode and is recorded.

    Args:
        env: an environment on the contract of ``spear_envs``; not used by anyone else meanwhile.  With
            ``metadata["blocking"]`` it is stepped in a thread.
        engine: answers the prompts; must know ``prompts.tokenizer``'s ids.
        prompts: shared between episodes.
        task_id: task to reset to.
        sampling: how responses are drawn; its stop strings are those of ``prompts``.
        seed: of the environment and of the sampling.
        env_id: for the record.

    Raises:
        UnknownTaskError: the environment has no such task.
        SpearError: the engine or the environment failed; names the task and the turn.
    """
    core: Any = env.unwrapped
    blocking = bool(core.metadata.get("blocking"))
    sampling = replace(sampling, stop_strings=prompts.stop_strings)
    core.set_text_measure(prompts.measure)
    try:
        if blocking:
            observation, info = await _run_in_thread(env.reset, seed=seed, options={"task": task_id})
        else:
            observation, info = env.reset(seed=seed, options={"task": task_id})
    except EnvFault as fault:
        return _record_missing(core, prompts, task_id, fault, seed, env_id)
    record = _Record(info)
    dialogue = prompts.begin()
    images: list[np.ndarray] = []
    stop = StopReason.CONTEXT_LIMIT
    fault_kind: str | None = None
    for number in range(1, core.max_turns + 1):
        text, picture = text_of(observation), image_of(observation)
        prompt = dialogue.next(
            instruction=info["instruction"],
            observation=text,
            admissible_actions=info["admissible_actions"],
            turn=number,
            max_turns=core.max_turns,
            picture=picture,
        )
        if prompt is None:
            break
        picture = picture if prompt.shows_image else None
        images = _show_images(images, picture, prompts.layout)
        try:
            generation = await _generate(engine, prompt, sampling, images, task_id, seed, number)
        except ContextExceededError:
            break
        except EngineFault as broken:
            stop, fault_kind = StopReason.FAULT, broken.kind.value
            break
        response = prompts.decode(generation.token_ids)
        anchor = info["anchor"]
        try:
            if blocking:
                observation, reward, terminated, truncated, info = await _run_in_thread(env.step, response)
            else:
                observation, reward, terminated, truncated, info = env.step(response)
        except Exception as error:
            raise SpearError(f"{env_id}, task {task_id}, turn {number}: the environment broke: {error!r}") from error
        # What a local model read belongs to its training rows; other engines leave pictures to the replay.
        read = picture if prompts.mark_image is not None else None
        record.add(prompt, generation, response, text, anchor, float(reward), info, read)
        if terminated or truncated:
            stop = _find_stop(info, terminated)
            break
        dialogue.add(text, info["action"] or UNREAD_ACTION, generation.token_ids, generation.finish)
    else:
        # An environment on the contract truncates at max_turns; a wrapper in between may swallow that.
        stop = StopReason.TURN_LIMIT
    paid = record.paid if fault_kind is None else 0.0
    if stop is StopReason.CONTEXT_LIMIT and getattr(core, "reward_mode", "spear") == "spear":
        paid = compose_reward(info["reward_terms"], core.mu(core.training_step))
    return Trajectory(
        env_id=env_id,
        task_id=task_id,
        subtask=info["subtask"],
        instruction=info["instruction"],
        fingerprint=info["task_fingerprint"],
        layout=prompts.layout,
        turns=tuple(record.turns),
        reward_terms=dict(info["reward_terms"]),
        reward=paid,
        score=float(info["score"]),
        won=bool(info["won"]),
        tool_calls=int(info["tool_calls"]),
        stop=stop,
        fault=fault_kind or info["fault"],
        seed=seed,
        tokens=_name_tokens(prompts),
        final_observation=text_of(observation) if record.turns else "",
    )


def _name_tokens(prompts: PromptBuilder) -> TokenKind:
    return TokenKind.BYTES if isinstance(prompts.tokenizer, ByteTokenizer) else TokenKind.MODEL


async def _run_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``function`` returns, run beside the event loop.

    The loop's own pool has a few threads for each core, which is too few for episodes that wait for a service.
    """
    threads = _open_threads(os.getpid())
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **kwargs))


@lru_cache(maxsize=1)
def _open_threads(pid: int) -> ThreadPoolExecutor:
    """The threads of a process: a child that was forked has none of its parent's."""
    return ThreadPoolExecutor(BLOCKING_ENVIRONMENTS, thread_name_prefix="blocking-env")


def name_request(task_id: str, seed: int, turn: int) -> str:
    """The engine's id of one turn's request; ids of an episode sort by turn (from 1)."""
    return f"{task_id}#{seed:010d}#{turn:04d}"


async def _generate(
    engine: Engine,
    prompt: Prompt,
    sampling: Sampling,
    images: Sequence[np.ndarray],
    task_id: str,
    seed: int,
    turn: int,
) -> Generation:
    """One response, with the seed and the request id of its turn."""
    limit = sampling.max_tokens if prompt.room is None else min(sampling.max_tokens, prompt.room)
    drawn = replace(sampling, seed=derive_seed(task_id, seed, turn), max_tokens=limit)
    try:
        name = name_request(task_id, seed, turn)
        generation = await engine.generate(prompt.ids, drawn, request_id=name, images=images)
    except (EngineFault, ContextExceededError):
        raise
    except Exception as error:
        raise SpearError(f"task {task_id}, turn {turn}: the engine failed: {_describe(error)}") from error
    served = generation.served.log_probs if generation.served is not None else None
    if math.isnan(sum(generation.log_probs)) or math.isnan(sum(served or ())):
        raise EngineFault(EngineFaultKind.NOT_A_NUMBER, "a log-probability is NaN")
    return generation


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, SpearError) else repr(error)


def _show_images(images: list[np.ndarray], picture: np.ndarray | None, layout: Layout) -> list[np.ndarray]:
    """The pictures that go with a prompt: the present one, in a conversation after all earlier ones."""
    if picture is None:
        return images if layout is Layout.CONVERSATION else []
    return [*images, picture] if layout is Layout.CONVERSATION else [picture]


def _find_stop(info: Mapping[str, Any], terminated: bool) -> StopReason:
    if info["fault"] is not None:
        return StopReason.FAULT
    if info["won"]:
        return StopReason.WON
    return StopReason.FAILED if terminated else StopReason.TURN_LIMIT


def _record_missing(
    core: Any, prompts: PromptBuilder, task_id: str, fault: EnvFault, seed: int, env_id: str
) -> Trajectory:
    """An episode that could not begin."""
    task = core.tasks.get(task_id)
    return Trajectory(
        env_id=env_id,
        task_id=task_id,
        subtask=task.subtask,
        instruction=task.instruction,
        fingerprint=core.tasks.fingerprint,
        layout=prompts.layout,
        turns=(),
        reward_terms={},
        reward=0.0,
        score=0.0,
        won=False,
        tool_calls=0,
        stop=StopReason.FAULT,
        fault=fault.kind,
        seed=seed,
        tokens=_name_tokens(prompts),
    )


@dataclass
class _Record:
    """The turns of an episode under way."""

    info: Mapping[str, Any]
    turns: list[Turn] = field(default_factory=list)
    paid: float = 0.0

    def add(
        self,
        prompt: Prompt,
        generation: Generation,
        response: str,
        observation: str,
        anchor: object,
        reward: float,
        info: Mapping[str, Any],
        picture: np.ndarray | None,
    ) -> None:
        before = self.info["reward_terms"]["native_return"]
        self.info = info
        self.paid += reward
        self.turns.append(
            Turn(
                prompt_ids=prompt.new_ids,
                response_ids=generation.token_ids,
                log_probs=generation.log_probs,
                response=response,
                action=info["action"],
                observation=observation,
                format_ok=bool(info["format_ok"]),
                action_ok=bool(info["action_ok"]),
                anchor=anchor if isinstance(anchor, str) else repr(anchor),
                reward=round(float(info["reward_terms"]["native_return"] - before), 9),
                finish=generation.finish,
                served=generation.served,
                dropped_turns=prompt.dropped_turns,
                picture=picture,
            )
        )
