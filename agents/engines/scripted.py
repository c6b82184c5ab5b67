"""Policies written in Python behind the same seam as models: experts, random players, anything for a test."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from agents.engines.base import Finish, Generation, Sampling
from agents.engines.bytes import ByteTokenizer
from agents.prompting import Tokenizer
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import PromptTemplate

Policy = Callable[[str, random.Random], str]
"""Text of the prompt and a private random stream -> text of the response."""


class ScriptedEngine:
    """An :class:`~agents.engines.base.Engine` that writes what a policy says.

    Its log-probabilities are 0, since a script has no distribution.  The random stream of a call is seeded with
    ``sampling.seed``.

    Args:
        policy: called once for each response.
        tokenizer: of prompts and responses.
    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer | None = None) -> None:
        self._policy = policy
        self._tokenizer = tokenizer or ByteTokenizer()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """The policy's response; ``sampling.max_tokens`` does not bind a script."""
        prompt = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        ids = self._tokenizer.encode(self._policy(prompt, random.Random(sampling.seed)), add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None:
            ids = [*ids, self._tokenizer.eos_token_id]
        return Generation(tuple(ids), (0.0,) * len(ids), Finish.STOP)


class InfoWatch(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the last ``info`` of an environment, for policies that may look behind the text."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.info: Mapping[str, Any] = {}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the environment and keeps its info."""
        *_, self.info = result = self.env.reset(**kwargs)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the environment and keeps its info."""
        *_, self.info = result = self.env.step(action)
        return result

    def admissible_actions(self) -> list[str]:
        """What may be played now.  Raises SpearError where the environment does not list it."""
        actions = self.info.get("admissible_actions")
        if not actions:
            raise SpearError(f"{self.env} lists no admissible actions, so there is no random policy for it")
        return actions


def random_policy(env: InfoWatch, template: PromptTemplate) -> Policy:
    """Plays one of the admissible actions with equal probability, well formed."""
    return lambda prompt, dice: template.respond(dice.choice(env.admissible_actions()))


def expert_policy(env: InfoWatch, template: PromptTemplate, noise: float = 0.0) -> Policy:
    """Plays the environment's oracle; with probability ``noise`` a random admissible action, after which it plans anew.

    Once no plan wins any more it plays at random, so that the episode comes to its end.
    """
    core: Any = env.unwrapped
    plan: list[str] = []
    lost = False

    def respond(prompt: str, dice: random.Random) -> str:
        nonlocal plan, lost
        if core.turn == 0:
            plan, lost = [], False
        if not plan and not lost:
            plan = list(core.expert_plan())
            lost = not plan  # a search for a plan that does not exist is the dearest of all: do it once
        stray = lost or dice.random() < noise
        action = dice.choice(env.admissible_actions()) if stray else plan[0]
        plan = plan[1:] if plan[:1] == [action] else []
        return template.respond(action)

    return respond
