"""From settings to a player: the engine, its tokenizer, and how a job is played."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from spear_agents.baselines.forms import Method, make_form, wrap_reader
from spear_agents.chat import Tokenizer
from spear_agents.end_tokens import require_end_ids
from spear_agents.engines.base import Engine
from spear_agents.engines.bytes import ChatByteTokenizer
from spear_agents.engines.openai import OpenAIEngine, require_reachable
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine, random_policy, scripted_policy
from spear_agents.engines.vllm import VLLMEngine
from spear_agents.engines.vllm_options import require_vllm
from spear_agents.prompting import PromptBuilder, find_image_mark
from spear_agents.settings import DEFAULT_TOKENS, EngineKind, EvalSettings
from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import PromptTemplate

Env = gym.Env[Any, Any]


@dataclass(frozen=True)
class OpenPolicy:
    """A ready policy for environments from :meth:`wrap_env`; the settings have the model's own response limit."""

    engine_for: Callable[[Env], Engine]
    prompts: PromptBuilder
    settings: EvalSettings
    aclose: Callable[[], Awaitable[None]]
    """Releases what belongs to the event loop."""

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
    """Open the policy of resolved settings, with what to close on ``stack``. Raises SpearError if it does not fit."""
    words = template if settings.method is Method.PLAIN else make_form(settings.method, template, parser)
    opened = _open_engine(settings, template, stack, concurrency, deterministic)
    prompts = PromptBuilder(
        opened.tokenizer,
        words,
        settings.layout or Layout.PER_TURN,
        history=settings.history,
        max_prompt_tokens=settings.max_prompt_tokens or opened.max_prompt_tokens,
        stop_token_ids=opened.end_ids,
        overlong=settings.overlong,
        mark_image=opened.mark_image,
        template_kwargs=settings.template_kwargs,
    )
    return OpenPolicy(opened.engine_for, prompts, replace(settings, max_tokens=opened.max_tokens), opened.aclose)


async def _close_nothing() -> None:
    pass


@dataclass(frozen=True)
class _OpenEngine:
    engine_for: Callable[[Env], Engine]
    tokenizer: Tokenizer
    max_tokens: int | None
    max_prompt_tokens: int | None = None
    """Tokens of the model's context left for a prompt; None if unknown."""
    aclose: Callable[[], Awaitable[None]] = _close_nothing
    mark_image: Callable[[np.ndarray], str] | None = None
    end_ids: tuple[int, ...] = ()


def _open_engine(
    settings: EvalSettings, template: PromptTemplate, stack: ExitStack, concurrency: int, deterministic: bool
) -> _OpenEngine:
    if settings.engine.has_folder:
        if settings.engine is EngineKind.VLLM:
            require_vllm()  # its extra brings torch, too
        from spear_agents.engines.hf import HFEngine, HFModel, load_tokenizer  # torch is needed here only

        assert settings.model is not None
        tokenizer = load_tokenizer(settings.model)
        end_ids = require_end_ids(settings.model, tokenizer)
        model: HFModel | VLLMEngine
        local: HFEngine | VLLMEngine
        mark_image: Callable[[np.ndarray], str] | None
        if settings.engine is EngineKind.VLLM:
            model = local = VLLMEngine(settings.model, settings.vllm, max_batch=concurrency)
            mark = find_image_mark(tokenizer)
            mark_image = (lambda picture: mark) if local.takes_images else None
        else:
            model = HFModel(settings.model, dtype=settings.dtype)
            local = HFEngine(model, max_batch=concurrency, deterministic=deterministic)
            mark_image = model.reader.mark if model.reader is not None else None
        stack.callback(local.close)
        limit = settings.max_tokens or model.max_new_tokens or DEFAULT_TOKENS
        left = model.context_length - limit
        if left < 1:
            raise SpearError(f"responses of {limit} tokens leave no room in a context of {model.context_length}: "
                             "give --max-tokens")  # fmt: skip
        return _OpenEngine(lambda env: local, tokenizer, limit, left, mark_image=mark_image, end_ids=end_ids)
    if settings.engine is EngineKind.OPENAI:
        assert settings.server is not None
        remote = OpenAIEngine(settings.server)
        require_reachable(settings.server)
        limit = settings.max_tokens or DEFAULT_TOKENS
        return _OpenEngine(lambda env: remote, remote.tokenizer, limit, aclose=remote.aclose)

    codec = ChatByteTokenizer()

    def engine_for(env: Env) -> Engine:
        assert isinstance(env, InfoWatch)
        if settings.engine is EngineKind.RANDOM:
            return ScriptedEngine(random_policy(env, template), codec)
        if settings.engine is EngineKind.SCRIPT:
            return ScriptedEngine(scripted_policy(env, template), codec)
        return ScriptedEngine(NoisyExpert(env, template, thoughts=settings.thoughts), codec)

    return _OpenEngine(engine_for, codec, settings.max_tokens)
