"""Policies written in Python with the interface of models: experts, random players, tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from spear_agents.engines.base import ByteTokenizer, Finish, Generation, Sampling, cut_at_stop
from spear_agents.play.chat import Tokenizer
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import PromptTemplate

Policy = Callable[[str, random.Random], str]
"""Text of the prompt and a private random stream -> text of the response."""


class ScriptedEngine:
    """An :class:`~spear_agents.engines.base.Engine` over a Python policy.

    Its log-probabilities are 0, since scripts lack a distribution. The random stream of a call is seeded with
    ``sampling.seed``.
    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer | None = None) -> None:
        self._policy = policy
        self._tokenizer = tokenizer or ByteTokenizer()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """Return the policy's response; ``sampling.max_tokens`` is ignored."""
        prompt = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        written, cut = cut_at_stop(self._policy(prompt, random.Random(sampling.seed)), sampling.stop_strings)
        ids = self._tokenizer.encode(written, add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None and not cut:
            ids = [*ids, self._tokenizer.eos_token_id]
        return Generation(tuple(ids), (0.0,) * len(ids), Finish.STRING if cut else Finish.STOP)


class InfoWatch(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the last ``info`` of an environment, for policies that need more than the text."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.info: Mapping[str, Any] = {}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and keep its info."""
        *_, self.info = result = self.env.reset(**kwargs)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment and keep its info."""
        *_, self.info = result = self.env.step(action)
        return result

    def admissible_actions(self) -> list[str]:
        """Return the admissible actions. Raises SpearError if the environment does not list them."""
        actions = self.info.get("admissible_actions")
        if not actions:
            name = type(self.unwrapped).__name__
            raise SpearError(f"{name} does not list admissible actions: take the engine expert, without noise")
        return actions


def random_policy(env: InfoWatch, template: PromptTemplate) -> Policy:
    """Play a uniformly random admissible action, well-formed."""
    return lambda prompt, dice: template.respond(dice.choice(env.admissible_actions()))


def scripted_policy(env: InfoWatch, template: PromptTemplate) -> Policy:
    """Play the environment's script. Raises SpearError if there is none."""
    core: Any = env.unwrapped

    def respond(prompt: str, dice: random.Random) -> str:
        action = core.scripted_action()
        if action is None:
            raise SpearError(f"{type(core).__name__} has no script: take the engine random or expert")
        return template.respond(action)

    return respond


class NoisyExpert:
    """A :data:`Policy`: the environment's oracle, which with probability ``noise`` errs and then plans again.

    An error is a random admissible action; a share ``inadmissible`` of the errors is an action that was admissible
    earlier in the episode and no longer is, if there is one. Once no plan wins, all actions are random until the
    episode ends. With ``thoughts`` it explains its plan, if the environment has words for it.
    """

    def __init__(
        self,
        env: InfoWatch,
        template: PromptTemplate,
        noise: float = 0.0,
        inadmissible: float = 0.0,
        thoughts: bool = False,
    ) -> None:
        self._env = env
        self._template = template
        self._noise = noise
        self._inadmissible = inadmissible
        self._thoughts = thoughts
        self._received: dict[str, None] = {}
        self._plan: list[str] = []
        self._lost = False
        self.advice: str | None = None
        """The oracle's response in the last turn, whatever was played; None if the task was lost."""

    def __call__(self, prompt: str, dice: random.Random) -> str:
        """Return the response of this turn."""
        core: Any = self._env.unwrapped
        if core.turn == 0:
            self._plan, self._lost, self._received = [], False, {}
        if not self._plan and not self._lost:
            self._plan = list(core.expert_plan())
            self._lost = not self._plan  # a failing search is the most expensive: do it once
        thought = core.expert_thought(self._plan) if self._thoughts and self._plan else ""
        self.advice = None if self._lost else self._template.respond(self._plan[0], thought)
        stray = self._lost or dice.random() < self._noise
        action = self._stray(dice) if stray else self._plan[0]
        follows = self._plan[:1] == [action]
        self._plan = self._plan[1:] if follows else []
        if self._inadmissible:
            self._received |= dict.fromkeys(self._env.admissible_actions())
        return self._template.respond(action, thought if follows else "")

    def _stray(self, dice: random.Random) -> str:
        actions = self._env.admissible_actions()
        if self._inadmissible and dice.random() < self._inadmissible:
            impossible = [action for action in self._received if action not in actions]
            return dice.choice(impossible or actions)
        return dice.choice(actions)
