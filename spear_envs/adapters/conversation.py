"""An environment as a conversation, the base of all adapters: it sends messages, the model responses."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from spear_envs.core.env import RewardMode, SpearEnv, image_of, text_of
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.making import make_env
from spear_envs.core.prompts import PromptContext, PromptTemplate
from spear_envs.core.rewards import compose_reward
from spear_envs.core.tools import CallParser, show_call
from spear_sandbox.options import option

ENDED = "The task has ended. Do not call any tool."
"""Answer to a model that acts by calling tools, after the end."""


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of a service of an environment, except for the environment itself."""

    max_sessions: int = option(64, "Clients at a time; more are turned away.", at_least=1, at_most=4096)
    idle_s: float = option(900.0, "Seconds without a message after which a session ends.", flag="idle", above=0)
    message_bytes: int = option(
        4 << 20, "MiB of one message of a client.", flag="max-message-mb", at_least=1, unit=1 << 20
    )
    body_bytes: int = 64 << 10
    """Most bytes of a request over HTTP."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that clients must send; None for no token."""
    local: bool = True
    """Listens on the loopback interface: requests under the name of another host are refused."""


@dataclass(frozen=True)
class Message:
    """What an environment says in one turn."""

    text: str
    """Text for the model: in the first turn task and rules, later what changed; at the end the last observation."""
    observation: str
    """The text of the observation alone."""
    image: np.ndarray | None
    """Picture, uint8 [height, width, 3], if there is one."""
    reward: float
    """Reward of the turn; 0 after a reset."""
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]
    """Information of the turn, as ``StepInfo``."""

    @property
    def done(self) -> bool:
        """Return whether the episode has ended."""
        return self.terminated or self.truncated

    def encode_image(self) -> str | None:
        """Encode the picture as a PNG file in base64, if there is one."""
        if self.image is None:
            return None
        file = io.BytesIO()
        Image.fromarray(self.image).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode("ascii")


class Conversation:
    """One environment and the prompts around its observations.

    Raises:
        SpearError: there is no template of this name.
    """

    def __init__(self, env: SpearEnv[Any], template: str | PromptTemplate = "default") -> None:
        if isinstance(template, str):
            if template not in env.templates:
                known = ", ".join(env.templates)
                raise SpearError(
                    f"template={template!r} is not valid: choose one of {known}.{suggest_name(template, env.templates)}"
                )
            template = env.templates[template]
        self.env = env
        self.template = template

    def reset(self, *, task: str | None = None, seed: int | None = None) -> Message:
        """Begin an episode.

        Raises:
            UnknownTaskError: this split has no task of this id.
            EnvFault: a service that the task needs is down.
        """
        observation, info = self.env.reset(seed=seed, options=None if task is None else {"task": task})
        system = self.template.system()
        prompt = self.template.render(self._context(observation, info))
        text = f"{system}\n\n{prompt}" if system else prompt
        return Message(text, text_of(observation), image_of(observation), 0.0, False, False, info)

    def respond(self, response: str) -> Message:
        """Play the model's response.

        Raises:
            ResetNeeded: no episode is under way.
        """
        observation, reward, terminated, truncated, info = self.env.step(response)
        if terminated or truncated:
            text = text_of(observation)
        else:
            text = self.template.follow_up(self._context(observation, info))
        return Message(text, text_of(observation), image_of(observation), float(reward), terminated, truncated, info)

    def pay(self, last: Message) -> float | None:
        """Compute the reward of an episode that stops after ``last``; one that has not ended counts as lost.

        Returns:
            None after a fault that was not the model's.
        """
        if last.info["fault"] is not None:
            return None
        terms = last.info["reward_terms"]
        if self.env.reward_mode is RewardMode.NATIVE:
            return float(terms["native_return"])
        return compose_reward(terms, self.env.mu(self.env.training_step))

    def _context(self, observation: Any, info: Mapping[str, Any]) -> PromptContext:
        return PromptContext(
            instruction=info["instruction"],
            observation=text_of(observation),
            admissible_actions=info["admissible_actions"],
            history=(),
            turn=info["turn"] + 1,
            max_turns=self.env.max_turns,
            picture=image_of(observation) is not None,
        )


def make_conversation(env_id: str, template: str | PromptTemplate = "default", **keywords: Any) -> Conversation:
    """Make a ``Conversation`` over :func:`~spear_envs.core.making.make_env`."""
    return Conversation(make_env(env_id, keywords=keywords), template)


@dataclass(frozen=True)
class CallTemplate:
    """A template that writes the actions of another as calls of the environment's tools.

    Args:
        inner: the other template.
        env: its tools may change with the task.
    """

    inner: PromptTemplate
    env: SpearEnv[Any]

    @property
    def name(self) -> str:
        """See :class:`PromptTemplate`."""
        return self.inner.name

    @property
    def token_pattern(self) -> str | None:
        """See :class:`PromptTemplate`."""
        return self.inner.token_pattern

    def system(self) -> str | None:
        """See :class:`PromptTemplate`."""
        return self.inner.system()

    def render(self, context: PromptContext) -> str:
        """See :meth:`PromptTemplate.render`."""
        return self.inner.render(self._show(context))

    def follow_up(self, context: PromptContext) -> str:
        """See :meth:`PromptTemplate.follow_up`."""
        return self.inner.follow_up(self._show(context))

    def respond(self, action: str, think: str = "") -> str:
        """See :class:`PromptTemplate`."""
        return self.inner.respond(action, think)

    def _show(self, context: PromptContext) -> PromptContext:
        actions = context.admissible_actions
        if actions is None:
            return context
        return replace(context, admissible_actions=[show_call(self.env.tools, action) for action in actions])


def find_tools_template(env: SpearEnv[Any]) -> CallTemplate:
    """Find the environment's template for tools, or its default (else first) one, asking for a call at the end.

    Raises:
        SpearError: it has neither.
    """
    if "tools" in env.templates:
        return CallTemplate(env.templates["tools"], env)
    template = env.templates.get("default") or next(iter(env.templates.values()))
    if is_dataclass(template) and any(field.name == "parser" for field in fields(template)):
        calling: Any = replace(template, parser=CallParser(env.tools, env.parser))
        return CallTemplate(calling, env)
    raise SpearError(f"{type(env).__name__} has no template for tools: give it one named 'tools'.")
