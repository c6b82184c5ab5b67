"""What a noisy expert says: supervised examples, played by the one episode loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.engines.base import Sampling
from agents.engines.bytes import ByteTokenizer
from agents.engines.scripted import InfoWatch, ScriptedEngine, expert_policy
from agents.evaluate import choose_template, make_env
from agents.prompting import PromptBuilder
from agents.rollout import Job, play_many
from agents.trajectory import Layout, Trajectory
from spear_envs.core.errors import SpearError


@dataclass(frozen=True)
class ExpertRow:
    """One supervised sequence: texts to read and texts to write in turn, beginning with one to read.

    ``per_turn`` rows have one of each; a ``conversation`` has as many as the episode has turns.
    """

    prompts: tuple[str, ...]
    responses: tuple[str, ...]


def collect_expert_rows(
    env_id: str,
    env_kwargs: Mapping[str, Any],
    *,
    episodes: int,
    noise: float,
    seed: int = 0,
    template: str = "compact",
    layout: Layout = Layout.PER_TURN,
    history: int = 2,
    split: str = "train",
    on_episode: Callable[[bool], None] | None = None,
) -> list[ExpertRow]:
    """Plays ``episodes`` training tasks with an expert that errs, and keeps the episodes it wins.

    With probability ``noise`` a turn is a random admissible action, after which the expert plans anew; the errors are
    part of the rows.  So the policy sees states off the shortest path and stays soft enough for reinforcement learning.

    Args:
        on_episode: called after each episode with whether it was won.

    Raises:
        SpearError: unknown environment, keywords or template; or not one episode was won.
    """
    env = make_env(env_id, split, env_kwargs)
    tasks: Any = env.tasks  # type: ignore[attr-defined]
    words = choose_template(env, template)
    dice = np.random.Generator(np.random.Philox(seed))
    # Distinct tasks as long as there are enough; then the rest once more, with other seeds.
    picks = np.concatenate(
        [dice.choice(len(tasks), size=min(len(tasks), episodes - i), replace=False, shuffle=False)
         for i in range(0, episodes, len(tasks))]
    )  # fmt: skip
    jobs = [Job(tasks[int(index)].id, seed * 1_000_003 + number) for number, index in enumerate(picks)]
    env.close()
    codec = ByteTokenizer()

    def engine_for(env: Any) -> ScriptedEngine:
        return ScriptedEngine(expert_policy(env, words, noise), codec)

    trajectories = asyncio.run(
        play_many(
            jobs,
            make_env=lambda: InfoWatch(make_env(env_id, split, env_kwargs)),
            engine_for=engine_for,
            prompts=PromptBuilder(codec, words, layout, history=history),
            sampling=Sampling(),
            env_id=env_id,
            concurrency=16,
            on_done=(lambda trajectory: on_episode(trajectory.won)) if on_episode else None,
        )
    )
    rows = [row for trajectory in trajectories if trajectory.won for row in make_rows(trajectory, codec)]
    if not rows:
        raise SpearError(f"the expert won none of {episodes} episodes: lower noise={noise} or raise max_turns")
    return rows


def make_rows(trajectory: Trajectory, codec: ByteTokenizer) -> list[ExpertRow]:
    """The texts of an episode that was recorded with ``codec``."""
    prompts = tuple(codec.decode(turn.prompt_ids) for turn in trajectory.turns)
    responses = tuple(turn.response for turn in trajectory.turns)
    if trajectory.layout is Layout.CONVERSATION:
        return [ExpertRow(prompts, responses)]
    return [ExpertRow((prompt,), (response,)) for prompt, response in zip(prompts, responses, strict=True)]
