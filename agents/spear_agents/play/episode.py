"""The loop that plays an episode, shared by evaluation, data collection and training rollouts."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import gymnasium as gym
import numpy as np

from spear_agents.engines.base import (
    ByteTokenizer,
    ContextExceededError,
    Engine,
    EngineFault,
    EngineFaultKind,
    Generation,
    Sampling,
    derive_seed,
)
from spear_agents.play.prompting import Prompt, PromptBuilder
from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import Layout, StopReason, TokenKind, Trajectory, Turn
from spear_envs.core.env import image_of, text_of
from spear_envs.core.errors import EnvFault, SpearError, describe_error
from spear_envs.core.prompts import NO_ACTION
from spear_envs.core.rewards import compose_reward

BLOCKING_ENVIRONMENTS = 128
"""Environments of a process that wait for a service at the same time; further ones queue."""


async def play_episode(
    env: gym.Env[Any, Any],
    engine: Engine,
    prompts: PromptBuilder,
    *,
    task_id: str,
    sampling: Sampling,
    seed: int,
    env_id: str,
    begin: Snapshot | None = None,
    snapshots: bool = False,
) -> Trajectory:
    """Play one episode to its end: observe, build the prompt, generate, step, record.

    Nothing is generated for an episode that has ended. Turn ``t`` is sampled with a seed derived from the task,
    ``seed`` and ``t`` (``sampling.seed`` is not read), so an episode does not depend on those played next to it. What a
    policy writes never raises; a fault of the environment or the engine ends the episode and is recorded, with a
    reward of 0.

    Args:
        env: an environment on the contract of ``spear_envs``, used by nobody else meanwhile. With
            ``metadata["blocking"]`` it is stepped in a thread.
        engine: answers the prompts; must know ``prompts.tokenizer``'s ids.
        prompts: shared between episodes.
        task_id: task to reset to.
        sampling: how responses are drawn; its stop strings are those of ``prompts``.
        seed: of the environment and of the sampling.
        env_id: for the record.
        begin: where the episode begins instead of the start of the task. The record has the turns from there on; what
            the environment counted before stays counted.
        snapshots: keep the moment before each response in the record.

    Raises:
        UnknownTaskError: the environment has no such task.
        SpearError: the engine or the environment failed; names the task and the turn. Or the layout is not
            ``per_turn``, and the episode is to begin in a snapshot.
    """
    sampling = replace(sampling, stop_strings=prompts.stop_strings)
    world = World(env, task_id, seed, env_id, begin)
    return await _Episode(world, engine, prompts, sampling, snapshots=snapshots).play()


def pay_early(core: Any, info: Mapping[str, Any], paid: float) -> float:
    """Return the reward of an episode that its player ends: ``paid`` so far, or what the environment pays at an end."""
    if getattr(core, "reward_mode", "spear") != "spear":
        return paid
    return compose_reward(info["reward_terms"], core.mu(core.training_step))


class World:
    """An environment with one episode under way: its present observation and the rewards so far.

    Args:
        env: an environment on the contract of ``spear_envs``, used by nobody else meanwhile. With
            ``metadata["blocking"]`` it is stepped in a thread.
        task_id: task to reset to.
        seed: of the environment.
        env_id: for the record.
        snapshot: where the episode begins; None for the start of the task.
    """

    def __init__(
        self, env: gym.Env[Any, Any], task_id: str, seed: int, env_id: str, snapshot: Snapshot | None = None
    ) -> None:
        self.env = env
        self.core: Any = env.unwrapped
        self.task_id = task_id
        self.seed = seed
        self.env_id = env_id
        self.snapshot = snapshot
        self.observation: Any = ""
        self.info: Mapping[str, Any] = {}
        self._paid = 0.0
        self._steps = 0
        self._begun = time.monotonic()

    async def begin(self, measure: Callable[[str], int] | None) -> StopReason | None:
        """Begin the episode; ``FAULT`` if that fails. ``measure`` counts a text's tokens. Raises UnknownTaskError."""
        self._begun = time.monotonic()
        self.core.set_text_measure(measure)
        try:
            self.observation, self.info = await self._call(
                self.env.reset, seed=self.seed, options={"task": self.task_id}
            )
            if self.snapshot is not None:
                self.observation, self.info = await self._call(self.snapshot.restore, self.core)
        except EnvFault as fault:
            task = self.core.tasks.get(self.task_id)
            self.info = {
                "subtask": task.subtask,
                "instruction": task.instruction,
                "task_fingerprint": self.core.tasks.fingerprint,
                "reward_terms": {},
                "score": 0.0,
                "won": False,
                "tool_calls": 0,
                "fault": fault.kind,
            }
            return StopReason.FAULT
        return None

    async def step(self, response: str) -> StopReason | None:
        """Play a response; return why the episode ends, or None. Raises SpearError with task and turn if it broke."""
        self._steps += 1
        try:
            self.observation, reward, terminated, truncated, self.info = await self._call(self.env.step, response)
        except Exception as error:
            where = f"{self.env_id}, task {self.task_id}, turn {self._steps}"
            raise SpearError(f"{where}: the environment broke: {describe_error(error)}") from error
        self._paid += float(reward)
        if not (terminated or truncated):
            return None
        if self.info["fault"] is not None:
            return StopReason.FAULT
        if self.info["won"]:
            return StopReason.WON
        return StopReason.FAILED if terminated else StopReason.TURN_LIMIT

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, in a thread if the environment waits for a service.

        The event loop's own pool has a few threads for each core, too few for these episodes.
        """
        if not self.core.metadata.get("blocking"):
            return function(*args, **kwargs)
        threads = _open_threads(os.getpid())
        return await asyncio.get_running_loop().run_in_executor(threads, partial(_carry, function, *args, **kwargs))

    def close(self, stop: StopReason, turns: Sequence[Turn], prompts: PromptBuilder, **given: Any) -> Trajectory:
        """Return the record of the episode; ``given`` replaces fields of it (``fault``, ``layout``)."""
        info, paid = self.info, self._paid
        if stop is StopReason.FAULT:
            paid = 0.0  # also what an environment with its native reward had paid before
        elif stop.is_early:
            paid = pay_early(self.core, info, paid)
        is_bytes = isinstance(prompts.tokenizer, ByteTokenizer)
        fields: dict[str, Any] = {"layout": prompts.layout, "fault": info["fault"], **given}
        return Trajectory(
            env_id=self.env_id,
            task_id=self.task_id,
            subtask=info["subtask"],
            instruction=info["instruction"],
            fingerprint=info["task_fingerprint"],
            turns=tuple(turns),
            reward_terms=dict(info["reward_terms"]),
            reward=paid,
            score=float(info["score"]),
            won=bool(info["won"]),
            tool_calls=int(info["tool_calls"]),
            stop=stop,
            seed=self.seed,
            retriever=info.get("retriever"),
            tokens=TokenKind.BYTES if is_bytes else TokenKind.MODEL,
            final_observation=text_of(self.observation) if turns else "",
            criteria=() if stop is StopReason.FAULT else tuple(self.core.criteria()),
            began=None if self.snapshot is None else self.snapshot.turn,
            seconds=round(time.monotonic() - self._begun, 3),
            **fields,
        )


async def draw_response(
    engine: Engine,
    ids: Sequence[int],
    sampling: Sampling,
    task_id: str,
    seed: int,
    turn: int,
    images: Sequence[np.ndarray] = (),
) -> Generation:
    """Draw response ``turn`` (from 1) of an episode, with its own seed and request id.

    Raises:
        EngineFault: there was no response, or a log-probability is NaN.
        ContextExceededError: the prompt is too long.
        SpearError: the engine failed; names the task and the turn.
    """
    drawn, asked = replace(sampling, seed=derive_seed(task_id, seed, turn)), time.monotonic()
    try:
        generation = await engine.generate(ids, drawn, request_id=name_request(task_id, seed, turn), images=images)
    except (EngineFault, ContextExceededError):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, SpearError) else repr(error)
        raise SpearError(f"task {task_id}, turn {turn}: the engine failed: {text}") from error
    served = generation.served.log_probs if generation.served is not None else None
    if math.isnan(sum(generation.log_probs)) or math.isnan(sum(served or ())):
        raise EngineFault(EngineFaultKind.NOT_A_NUMBER, "a log-probability is not a number")
    # A script answers within half a millisecond, which says nothing.
    return replace(generation, seconds=round(time.monotonic() - asked, 3) or None)


class _Episode:
    """An episode under way."""

    def __init__(
        self, world: World, engine: Engine, prompts: PromptBuilder, sampling: Sampling, *, snapshots: bool
    ) -> None:
        self.world = world
        self.engine = engine
        self.prompts = prompts
        self.sampling = sampling
        self.snapshots = snapshots
        self.dialogue = prompts.begin(world.snapshot.history if world.snapshot is not None else None)
        self.turns: list[Turn] = []
        self.images: list[np.ndarray] = []
        self.engine_fault: EngineFault | None = None

    async def play(self) -> Trajectory:
        """Play it to its end."""
        stop = await self.world.begin(self.prompts.measure)
        number = self.world.snapshot.turn if self.world.snapshot is not None else 0
        # An environment on the contract truncates at max_turns; a wrapper in between may swallow that.
        while stop is None and number < self.world.core.max_turns:
            number += 1
            stop = await self._play_turn(number)
        broken = self.engine_fault
        given = {"fault": broken.kind.value, "detail": broken.message} if broken is not None else {}
        return self.world.close(stop or StopReason.TURN_LIMIT, self.turns, self.prompts, **given)

    async def _play_turn(self, number: int) -> StopReason | None:
        """Play turn ``number`` (from 1); return why the episode ends, or None if it continues."""
        world, before = self.world, self.world.info
        snapshot = Snapshot.take(world.core, self.dialogue.recall()) if self.snapshots else None
        text, picture = text_of(world.observation), image_of(world.observation)
        prompt = self.dialogue.next(
            instruction=before["instruction"],
            observation=text,
            admissible_actions=before["admissible_actions"],
            turn=number,
            max_turns=world.core.max_turns,
            picture=picture,
        )
        if prompt is None:
            return StopReason.CONTEXT_LIMIT
        picture = picture if prompt.shows_image else None
        before_it = self.images if self.prompts.layout is Layout.CONVERSATION else []
        self.images = before_it if picture is None else [*before_it, picture]
        limit = self.sampling.max_tokens if prompt.room is None else min(self.sampling.max_tokens, prompt.room)
        sampling = replace(self.sampling, max_tokens=limit)
        try:
            generation = await draw_response(
                self.engine, prompt.ids, sampling, world.task_id, world.seed, number, self.images
            )
        except ContextExceededError:
            return StopReason.CONTEXT_LIMIT
        except EngineFault as broken:
            self.engine_fault = broken
            return StopReason.FAULT
        response = self.prompts.decode(generation.token_ids)
        stop = await world.step(response)
        # Training rows need what a local model read; other engines leave pictures to the replay.
        read = picture if self.prompts.mark_image is not None else None
        turn = _record_turn(prompt, generation, response, text, before, world.info, read)
        self.turns.append(replace(turn, snapshot=snapshot) if snapshot is not None else turn)
        if stop is None:
            action = world.info["action"] or NO_ACTION
            self.dialogue.add(text, action, generation.token_ids, generation.finish)
        return stop


def _carry(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in a thread; no future carries a StopIteration, for which its caller would wait for ever."""
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("the call raised StopIteration") from error


@lru_cache(maxsize=1)
def _open_threads(pid: int) -> ThreadPoolExecutor:
    """Return the threads of a process, which a forked child does not share."""
    return ThreadPoolExecutor(BLOCKING_ENVIRONMENTS, thread_name_prefix="blocking-env")


def name_request(task_id: str, seed: int, turn: int) -> str:
    """Return the engine's id of one turn's request; ids of an episode sort by turn (from 1)."""
    return f"{task_id}#{seed:010d}#{turn:04d}"


def _record_turn(
    prompt: Prompt,
    generation: Generation,
    response: str,
    observation: str,
    before: Mapping[str, Any],
    info: Mapping[str, Any],
    picture: np.ndarray | None,
) -> Turn:
    """Return the record of a turn that led from the ``info`` ``before`` it to ``info``."""
    anchor = before["anchor"]
    native = float(info["reward_terms"]["native_return"] - before["reward_terms"]["native_return"])
    return Turn(
        prompt_ids=prompt.new_ids,
        response_ids=generation.token_ids,
        log_probs=generation.log_probs,
        response=response,
        action=info["action"],
        observation=observation,
        format_ok=bool(info["format_ok"]),
        action_ok=bool(info["action_ok"]),
        anchor=anchor if isinstance(anchor, str) else repr(anchor),
        reward=round(native, 9),
        finish=generation.finish,
        served=generation.served,
        dropped_turns=prompt.dropped_turns,
        cached_tokens=generation.cached_tokens,
        version=generation.version,
        seconds=generation.seconds,
        picture=picture,
        follows=prompt.follows,
        native_thought=bool(info["native_thought"]),
    )
