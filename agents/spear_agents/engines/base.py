"""The interface between an episode and its engine: token ids in, token ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from spear_envs.core.errors import SpearError


class Finish(str, Enum):
    """Why a response ended."""

    STOP = "stop"
    """The policy produced a stop token (it is the last of ``token_ids``)."""
    LENGTH = "length"
    """``max_tokens`` were produced without a stop token."""
    STRING = "string"
    """The response reached a stop string, which is part of it; no stop token follows."""


@dataclass(frozen=True)
class Sampling:
    """How one response is sampled.

    ``top_k`` 0 and ``top_p`` 1 switch those filters off; ``temperature`` 0 is greedy. ``stop_token_ids`` end a
    response besides the model's own end tokens, and so does the first of ``stop_strings``, which stays part of it.
    With ``seed`` the response depends on the prompt, the weights and the seed only, not on its batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 switches it off), got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if "" in self.stop_strings:
            raise ValueError("a stop string must not be empty")


class Ending(str, Enum):
    """Why a server's response is not what the model would have said."""

    FILTER = "filter"
    """A filter withheld it, or a part of it."""
    TOOL_CALL = "tool_call"
    """It is a tool call in a field of its own."""


@dataclass(frozen=True)
class Served:
    """A server's data on one response.

    Attributes:
        model: the server's name of the model.
        prompt_tokens, completion_tokens, cached_tokens: the server's counts, or None.
        tries: number of requests.
        cost: in the currency of the prices; None without prices or counts.
        prompt_ids, token_ids, log_probs: the server's own tokens, or None.
        ending: why the response is not plain text; None if it is.
        note: the server's sentence on that.
        dropped: fields of the request that the server refused and did not get.
    """

    model: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    tries: int = 1
    cost: float | None = None
    prompt_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    ending: Ending | None = None
    note: str = ""
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One response.

    ``log_probs`` has one entry for each token: its natural-log probability under the model's distribution at the
    sampling temperature, before top-k and top-p (the convention of verl's rollouts). At temperature 0 it is the
    greedy token's under temperature 1. Policies without a distribution (scripts) give zeros.
    ``cached_tokens`` of the prompt were in the engine's prefix cache; None without one.
    ``version`` is the training step of the weights; None outside a training.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish
    served: Served | None = None
    cached_tokens: int | None = field(default=None, compare=False)
    version: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Request:
    """One pending call of :meth:`Engine.generate`."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    request_id: str
    images: Sequence[np.ndarray] = ()


class EngineFaultKind(str, Enum):
    """Kind of a fault in generating a response."""

    UNREACHABLE = "engine_unreachable"
    """There was no answer, or the connection broke."""
    TIMEOUT = "engine_timeout"
    """The answer was not complete in time."""
    OVERLOADED = "engine_overloaded"
    """The server kept asking to wait."""
    SERVER_ERROR = "engine_server_error"
    """The server failed."""
    BAD_REPLY = "engine_bad_reply"
    """The answer does not follow the interface."""
    DEAD = "engine_dead"
    """The engine's process has ended."""
    OUT_OF_MEMORY = "engine_out_of_memory"
    """The engine's process has ended for lack of memory."""
    NOT_A_NUMBER = "engine_nan"
    """A log-probability is NaN: the weights are broken, or an overflow occurred."""


class AgentFaultKind(str, Enum):
    """Fault of an agent program."""

    FAILED = "agent_failed"
    """It raised an error."""
    TIMEOUT = "agent_timeout"
    """It did not end in time."""
    STOPPED = "gateway_stopped"
    """The gateway was stopped."""


class EngineFault(SpearError):
    """There was no response through no fault of the policy: the episode ends as a fault."""

    def __init__(self, kind: EngineFaultKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


class ContextExceededError(SpearError):
    """The prompt is too long for the engine: the episode ends as ``context_limit``."""


class Engine(Protocol):
    """Answers prompts, possibly many at the same time."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """Return the response to ``prompt_ids``. ``images`` are uint8 arrays [height, width, 3], oldest first.

        ``request_id`` is unique among the calls under way and sorts in the order in which a canonical batch is built.

        Raises:
            EngineFault: there was no response; another try later may succeed.
            ContextExceededError: the prompt is too long.
        """
        ...


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) from the text of ``parts``; the same in every process and on every machine."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
