"""From settings to somebody who plays: the engine, its tokenizer, and how a job is played."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym

from agents.baselines.forms import Method, make_form, wrap_reader
from agents.engines.base import Engine
from agents.engines.bytes import ChatByteTokenizer
from agents.engines.openai import OpenAIEngine
from agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine, random_policy
from agents.prompting import PromptBuilder, Tokenizer
from agents.settings import EngineKind, EvalSettings
from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import PromptTemplate

Env = gym.Env[Any, Any]


@dataclass(frozen=True)
class OpenPolicy:
    """A policy that is ready to play.

    Attributes:
        engine_for: the engine that plays in an environment (one that :meth:`wrap_env` gave).
        prompts: writes its prompts.
        settings: with the model's own limit of a response filled in.
    """

    engine_for: Callable[[Env], Engine]
    prompts: PromptBuilder
    settings: EvalSettings
    aclose: Callable[[], Awaitable[None]]
    """Ends what belongs to the event loop that played."""

    def wrap_env(self, env: Env) -> Env:
        """The environment as this policy plays it."""
        return InfoWatch(wrap_reader(self.settings.method, env))


def open_policy(
    settings: EvalSettings,
    template: PromptTemplate,
    parser: ResponseParser,
    stack: ExitStack,
    *,
    concurrency: int = 128,
    deterministic: bool = False,
) -> OpenPolicy:
    """Opens the policy of resolved settings; what has to be closed goes onto ``stack``.

    Raises:
        SpearError: a model that cannot be loaded, a template or layout that does not go with it.
    """
    words = template if settings.method is Method.PLAIN else make_form(settings.method, template, parser)
    engine_for, tokenizer, settings, aclose = _open_engine(settings, template, stack, concurrency, deterministic)
    prompts = PromptBuilder(
        tokenizer,
        words,
        settings.layout or "per_turn",
        history=settings.history,
        max_prompt_tokens=settings.max_prompt_tokens,
        overlong=settings.overlong,
    )
    return OpenPolicy(engine_for, prompts, settings, aclose)


async def _close_nothing() -> None:
    pass


def _open_engine(
    settings: EvalSettings, template: PromptTemplate, stack: ExitStack, concurrency: int, deterministic: bool
) -> tuple[Callable[[Env], Engine], Tokenizer, EvalSettings, Callable[[], Awaitable[None]]]:
    if settings.engine is EngineKind.HF:
        from agents.engines.hf import HFEngine, HFModel, load_tokenizer  # torch is needed here only

        assert settings.model is not None
        tokenizer = load_tokenizer(settings.model)
        model = HFModel(settings.model)
        limit = settings.max_tokens or model.max_new_tokens or 512
        local = HFEngine(model, max_batch=concurrency, deterministic=deterministic)
        stack.callback(local.close)
        return lambda env: local, tokenizer, replace(settings, max_tokens=limit), _close_nothing
    if settings.engine is EngineKind.OPENAI:
        assert settings.server is not None
        remote = OpenAIEngine(settings.server)
        limit = settings.max_tokens or 512
        return lambda env: remote, remote.tokenizer, replace(settings, max_tokens=limit), remote.aclose

    codec = ChatByteTokenizer()

    def engine_for(env: Env) -> Engine:
        assert isinstance(env, InfoWatch)
        is_random = settings.engine is EngineKind.RANDOM
        policy = random_policy(env, template) if is_random else NoisyExpert(env, template)
        return ScriptedEngine(policy, codec)

    return engine_for, codec, settings, _close_nothing
