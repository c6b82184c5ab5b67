"""Settings of an evaluation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

import gymnasium as gym
import numpy as np

from spear_agents.comparison.tables import choose_samples
from spear_agents.engines.base import ChatByteTokenizer, Engine, Sampling, require_end_ids
from spear_agents.engines.openai import Offer, OpenAIEngine, Server, ToolEngine, require_reachable
from spear_agents.engines.scripted import InfoWatch, NoisyExpert, ScriptedEngine, random_policy, scripted_policy
from spear_agents.engines.vllm import VLLMEngine
from spear_agents.engines.vllm_options import DTYPES, VLLMOptions, require_vllm
from spear_agents.evaluation.baselines import Method, make_form, wrap_reader
from spear_agents.model_files import resolve_model
from spear_agents.models import digest_model, has_words
from spear_agents.play.chat import Tokenizer
from spear_agents.play.prompting import Overlong, PromptBuilder, find_image_mark
from spear_agents.play.rollout import Job
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import PromptTemplate
from spear_sandbox.options import option

_POLICY, _EPISODES, _SAMPLING, _PROMPTS = "Policy", "Episodes", "Sampling", "Prompts"
_PROGRAM = "Agent program"
"""Headings of options."""
CONCURRENCY = 128
"""Episodes at a time, unless a server limits its requests."""
MAX_SAMPLES = 10_000
DEFAULT_TOKENS = 512
"""Longest response if neither settings nor model set it."""
JOINABLE = ("tasks", "episodes_per_task", "server", "vllm", "dtype", "agent_timeout")
"""Settings that may differ between runs in one folder: tasks and samples may be added, and a server may move. ``dtype``
and the options of ``vllm`` that change figures are compared separately.
"""


class EngineKind(str, Enum):
    """Who plays."""

    HF = "hf"
    """A model in a Hugging Face folder, run by transformers."""
    VLLM = "vllm"
    """A model in a Hugging Face folder, run by vLLM."""
    OPENAI = "openai"
    """A model behind a server that speaks OpenAI's chat completions."""
    RANDOM = "random"
    """A uniform choice among the admissible actions, well-formed."""
    SCRIPT = "script"
    """A fixed script without understanding, if the environment has one."""
    EXPERT = "expert"
    """The environment's own oracle."""

    @property
    def has_folder(self) -> bool:
        """Whether the model is a Hugging Face folder, whose tokens are recorded."""
        return self in (EngineKind.HF, EngineKind.VLLM)


@dataclass(frozen=True)
class PlayedPanel:
    """The panel of a run, as its files record it (``spear_agents.evaluation.panels``).

    Attributes:
        name: of the panel; an override is part of the name.
        digest: SHA-256 of its tasks and protocol.
        overrides: options that replaced the values of the named panel, with theirs. A panel with any is another one.
    """

    name: str
    digest: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and the beginning of the digest."""
        return f"{self.name} ({self.digest[:12]})"

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> PlayedPanel | None:
        """Read the panel from the settings of a run's folder; None if it was played without one.

        Raises SpearError for something else in its place.
        """
        written = settings.get("panel")
        if written is None:
            return None
        try:
            found = cls(str(written["name"]), str(written["digest"]), dict(written["overrides"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SpearError(f"panel={written!r} is not the panel of a run: it has name, digest, overrides") from error
        return found


@dataclass(frozen=True)
class EvalSettings:
    """Everything an evaluation's numbers depend on; its fields are the options of ``spear eval``."""

    env_id: str
    """Id of the environment, such as ``spear/Sokoban-v1``."""
    engine: EngineKind = option(EngineKind.HF, "Who plays.", section=_POLICY)
    model: str | None = option(
        None,
        "Folder or name of the policy (spear models; hf, vllm), or its name at the server (openai).",
        section=_POLICY,
    )
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the environment besides ``split``."""
    split: str | None = None
    """Split of the tasks; None for the environment's last one."""
    tasks: str = option("all", "all, a number (each subtask in its share), or ids.", section=_EPISODES)
    episodes_per_task: int | None = option(None, "Default: the benchmark's own, 30 on AIME, else 1.", section=_EPISODES)
    temperature: float = option(1.0, "Of the sampling; 0 takes the most likely token.", at_least=0, section=_SAMPLING)
    top_p: float = option(1.0, "Probability mass of the tokens.", above=0, at_most=1, section=_SAMPLING)
    top_k: int = option(0, "Number of the tokens; 0 is off.", section=_SAMPLING)
    max_tokens: int | None = option(
        None, "Longest response; default: the model's own limit, else 512.", at_least=1, section=_SAMPLING
    )
    max_prompt_tokens: int | None = option(
        None, "Longest prompt (openai: in bytes); default: the room in the context.", at_least=1, section=_PROMPTS
    )
    max_row_tokens: int | None = option(
        None,
        "Longest conversation after its first prompt, which --max-prompt-tokens then limits alone (openai: in bytes).",
        at_least=1,
        section=_PROMPTS,
    )
    overlong: Overlong = option(
        Overlong.END, "End an episode whose prompt grows beyond, or drop its oldest turns.", section=_PROMPTS
    )
    template: str | None = option(
        None,
        "Prompt template of the environment; spear eval takes compact for tiny models of words, else default.",
        section=_PROMPTS,
    )
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template (``hf``, ``vllm``, and servers of kind ``vllm``)."""
    layout: Layout | None = option(None, "Default: per_turn, or what the method needs.", section=_PROMPTS)
    history: int = option(2, "Earlier turns shown in per_turn prompts.", at_least=0, section=_PROMPTS)
    seed: int = option(0, "Of everything random.", at_least=0, section=_EPISODES)
    method: Method = option(Method.PLAIN, "How the model is prompted.", section=_PROMPTS)
    trials: int = option(1, "Maximum trials of a task (reflexion: 3).", section=_PROMPTS)
    thoughts: bool = option(False, "The expert says why it does what it does (expert).", section=_POLICY)
    server: Server | None = None
    """Where the model is served (``openai`` only)."""
    dtype: str | None = option(
        None, "Computation type; default: that of the weights (hf, vllm).", choices=DTYPES, section=_POLICY
    )
    vllm: VLLMOptions | None = None
    """How vLLM runs the model (``vllm`` only); None for its defaults."""
    agent: str | None = option(
        None, "Program that plays instead of our own loop.", metavar="FILE:FUNCTION", section=_PROGRAM
    )
    agent_timeout: float = option(3600.0, "Seconds the program may take for an episode.", above=0, section=_PROGRAM)
    panel: PlayedPanel | None = None
    """The panel that set tasks and protocol, if one did."""

    def __post_init__(self) -> None:
        plain = {
            name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in self.env_kwargs.items()
        }
        object.__setattr__(self, "env_kwargs", plain)  # records are JSON
        if self.episodes_per_task is not None and not 1 <= self.episodes_per_task <= MAX_SAMPLES:
            raise SpearError(f"episodes per task must lie between 1 and {MAX_SAMPLES}, got {self.episodes_per_task}")
        if self.engine.has_folder and self.model is None:
            raise SpearError(f"engine {self.engine.value} needs a model folder: give --model DIR")
        if self.dtype is not None and (self.engine is not EngineKind.HF or self.dtype not in DTYPES):
            raise SpearError(f"dtype {self.dtype!r}: only engine hf takes one, of {', '.join(DTYPES)}")
        if self.engine is EngineKind.OPENAI and (self.server is None or self.model != self.server.model):
            raise SpearError("engine openai needs a server and a model: give --base-url URL and --model NAME")
        if self.engine in (EngineKind.RANDOM, EngineKind.SCRIPT, EngineKind.EXPERT):
            if self.model is not None:
                raise SpearError(f"engine {self.engine.value} plays without a model: leave --model {self.model} out")
            if self.method is not Method.PLAIN:
                raise SpearError(
                    f"method {self.method.value} prompts a model: engine {self.engine.value} takes no prompt"
                )
        if self.thoughts and self.engine is not EngineKind.EXPERT:
            raise SpearError(f"thoughts are the expert's: engine {self.engine.value} has its own")
        if self.agent is not None and (
            self.method is not Method.PLAIN
            or self.layout is Layout.PER_TURN
            or self.engine in (EngineKind.RANDOM, EngineKind.EXPERT)
        ):
            raise SpearError("an agent asks a model in its own way: leave --method and --layout out, and give a model")
        if (
            self.server is not None
            and self.server.tools
            and (
                self.method is not Method.PLAIN
                or self.layout is Layout.CONVERSATION
                or self.agent is not None
                or self.template not in (None, "default", "tools")
            )
        ):
            raise SpearError(
                "--native-tools has prompts of its own: leave --method, --layout, --template and --agent out"
            )
        if self.trials < 1 or (self.trials > 1 and self.method is not Method.REFLEXION):
            raise SpearError(f"trials={self.trials}: give 1 or more, and more than 1 only with --method reflexion")

    @property
    def in_conversation(self) -> bool:
        """Whether the method or the agent program needs the layout ``conversation``."""
        return self.method in (Method.REACT, Method.REFLEXION) or self.agent is not None

    def resolve(self, split: str, templates: Collection[str]) -> EvalSettings:
        """Return the settings with the defaults of environment, engine and method filled in, and the model as a folder.

        Raises SpearError for a layout that the method does not support, or a model that is not available.
        """
        layout = self.layout or (Layout.CONVERSATION if self.in_conversation else Layout.PER_TURN)
        if self.in_conversation and layout is Layout.PER_TURN:
            raise SpearError(f"{self.method.value} keeps its thoughts in one conversation: leave --layout out")
        if self.max_row_tokens is not None and layout is Layout.PER_TURN:
            raise SpearError("--max-row-tokens limits a conversation: give --layout conversation, or leave it out")
        model = resolve_model(self.model) if self.engine.has_folder and self.model else self.model
        template = self.template
        if template is None:  # tiny models of words are trained with compact
            is_tiny = self.engine.has_folder and self.method is Method.PLAIN and has_words(str(model))
            preferred = "compact" if is_tiny else "default"
            template = preferred if preferred in templates else next(iter(templates))
        return replace(
            self,
            model=model,
            split=split,
            layout=layout,
            template=template,
            episodes_per_task=self.episodes_per_task or choose_samples(self.env_id, self.env_kwargs),
        )

    def sampling(self) -> Sampling:
        """Return the sampling of these settings. Raises SpearError if a value is out of range."""
        try:
            return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens or DEFAULT_TOKENS)
        except ValueError as error:
            raise SpearError(str(error)) from error

    def choose_concurrency(self, wanted: int | None = None) -> int:
        """Return the episodes at a time: as many as wanted (else SpearError below 1), or as a server takes requests.

        More would wait for each other, end later, and lose more of what was paid for when the run is interrupted. A
        program may also work between its requests.
        """
        if wanted is not None:
            if wanted < 1:
                raise SpearError(f"concurrency={wanted}: play 1 or more episodes at a time")
            return wanted
        return CONCURRENCY if self.server is None or self.agent is not None else self.server.limit

    def jobs(self, task_ids: Sequence[str]) -> list[Job]:
        """Return the jobs for all samples of all tasks: the first sample of every task, then the second."""
        base = self.seed * MAX_SAMPLES
        return [Job(task_id, base + k) for k in range(self.episodes_per_task or 1) for task_id in task_ids]

    def identify(self, fingerprint: str) -> dict[str, Any]:
        """Return the settings, tasks and weights that runs in one folder must share, as plain values."""
        wanted: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for key in JOINABLE:
            wanted.pop(key)
        wanted |= {"fingerprint": fingerprint, "tokenizer": "bytes"}
        if self.engine.has_folder and self.model is not None:
            wanted |= {"model_digest": digest_model(self.model), "tokenizer": self.model}
        if self.dtype is not None:
            wanted["dtype"] = self.dtype
        if self.vllm is not None:
            wanted |= {"dtype": self.vllm.dtype}
            if self.vllm.max_model_len is not None:
                wanted["max_model_len"] = self.vllm.max_model_len
            if self.vllm.lora is not None:
                wanted |= {"lora": self.vllm.lora, "lora_digest": digest_model(self.vllm.lora)}
        if self.server is not None:
            wanted["server_kind"] = self.server.kind.value
            changes: dict[str, Any] = {
                "reasoning_effort": self.server.reasoning_effort,
                "extra_body": dict(self.server.extra_body),
            }
            changes["native_tools"] = self.server.tools
            wanted |= {name: value for name, value in changes.items() if value}
            if self.server.headers:
                wanted["headers"] = sorted(self.server.headers)
        return wanted

    def to_json(self) -> dict[str, Any]:
        """Return plain values for records, without secrets."""
        return asdict(self) | {"server": self.server and self.server.to_json()}


def hash_settings(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 of :meth:`EvalSettings.identify`: equal hashes, same evaluation."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode("ascii")).hexdigest()


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
        """Return the environment as this policy plays it."""
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
    limits = [limit for limit in (settings.max_prompt_tokens, opened.max_prompt_tokens) if limit is not None]
    prompts = PromptBuilder(
        opened.tokenizer,
        words,
        settings.layout or Layout.PER_TURN,
        history=settings.history,
        max_prompt_tokens=min(limits, default=None),
        max_row_tokens=settings.max_row_tokens,
        stop_token_ids=opened.end_ids,
        overlong=settings.overlong,
        mark_image=opened.mark_image,
        template_kwargs=None if settings.server is not None else settings.template_kwargs,
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
            mark_image = local.reader.mark if local.reader else (lambda picture: mark) if local.takes_images else None
        else:
            model = HFModel(settings.model, dtype=settings.dtype)
            local = HFEngine(model, max_batch=concurrency, deterministic=deterministic)
            mark_image = model.reader.mark if model.reader is not None else None
        stack.callback(local.close)
        limit = settings.max_tokens or model.max_new_tokens or DEFAULT_TOKENS
        row = settings.max_row_tokens if settings.layout is Layout.CONVERSATION else None
        left = model.context_length - (row or limit)
        if left < (settings.max_prompt_tokens if row and settings.max_prompt_tokens else 1):
            what = f"conversations of {row} tokens" if row else f"responses of {limit} tokens"
            flag = "--max-row-tokens" if row else "--max-tokens"
            raise SpearError(f"{what} leave no room in a context of {model.context_length}: give {flag}")
        return _OpenEngine(lambda env: local, tokenizer, limit, left, mark_image=mark_image, end_ids=end_ids)
    if settings.engine is EngineKind.OPENAI:
        assert settings.server is not None
        remote = OpenAIEngine(settings.server, template_kwargs=settings.template_kwargs)
        require_reachable(settings.server)
        limit = settings.max_tokens or DEFAULT_TOKENS

        def offer_tools(env: Env) -> Engine:
            core: Any = env.unwrapped
            return ToolEngine(remote, Offer(lambda: core.tools, core.parser))

        engine_for_env = offer_tools if settings.server.tools else lambda env: remote
        return _OpenEngine(engine_for_env, remote.tokenizer, limit, aclose=remote.aclose)

    codec = ChatByteTokenizer()

    def engine_for(env: Env) -> Engine:
        assert isinstance(env, InfoWatch)
        if settings.engine is EngineKind.RANDOM:
            return ScriptedEngine(random_policy(env, template), codec)
        if settings.engine is EngineKind.SCRIPT:
            return ScriptedEngine(scripted_policy(env, template), codec)
        return ScriptedEngine(NoisyExpert(env, template, thoughts=settings.thoughts), codec)

    return _OpenEngine(engine_for, codec, settings.max_tokens)
