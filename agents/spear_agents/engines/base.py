"""The interface between an episode and its engine: token ids in, token ids out."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spear_envs.core.errors import SpearError
from spear_envs.data.files import read_regular

BYTES_END = 256
_ROLES = ("system", "user", "assistant")
_MARK = "\ufdd0{}\ufdd1"
"""Mark of a role, between two code points reserved by Unicode for internal use."""
_MARKS = re.compile("|".join(_MARK.format(role) for role in _ROLES))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a response. Any text survives a round trip, including lone surrogates."""

    eos_token_id: int | None = BYTES_END

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> str:
        """Join the contents, without end marks."""
        return "".join(message["content"] for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of bytes, without the end token; invalid bytes are replaced."""
        data = bytes(i for i in token_ids if i < BYTES_END)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


class ChatByteTokenizer(ByteTokenizer):
    """Bytes with a mark for each role, so that messages can be recovered from a prompt's ids.

    Ids 257 to 259 begin a message of the system, the user and the assistant. Marks within an observation are broken
    up by :class:`~spear_agents.play.prompting.PromptBuilder`, as those of any tokenizer.
    """

    all_special_tokens: tuple[str, ...] = tuple(_MARK.format(role) for role in _ROLES)

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> str:
        """Put each message after the mark of its role, and the assistant's mark at the end to continue."""
        text = "".join(_MARK.format(message["role"]) + message["content"] for message in conversation)
        return text + _MARK.format("assistant") if kwargs.get("add_generation_prompt") else text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of ``text`` and the ids of its marks."""
        ids: list[int] = []
        end = 0
        for mark in _MARKS.finditer(text):
            ids += super().encode(text[end : mark.start()])
            ids.append(BYTES_END + 1 + _ROLES.index(mark[0][1:-1]))
            end = mark.end()
        return ids + super().encode(text[end:])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the ids, without marks of roles if ``skip_special_tokens``."""
        text: list[str] = []
        for role, content in self._split(token_ids):
            text += [_MARK.format(role)] if role and not skip_special_tokens else []
            text.append(content)
        return "".join(text)

    def encode_plain(self, text: str) -> list[int]:
        """Return the bytes of ``text`` without recognising marks, for text of a model."""
        return super().encode(text)

    def read_messages(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """Recover the messages of a prompt, without the assistant's empty one.

        Text before the first mark, as in a later part of a conversation, is the assistant's.
        """
        messages = [
            {"role": role or "assistant", "content": content}
            for role, content in self._split(token_ids)
            if role or content
        ]
        if messages and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()
        return messages

    def _split(self, token_ids: Sequence[int]) -> list[tuple[str, str]]:
        """Return the role and content of each message; the role is empty before the first mark."""
        parts: list[tuple[str, list[int]]] = [("", [])]
        for token in token_ids:
            if BYTES_END < token <= BYTES_END + len(_ROLES):
                parts.append((_ROLES[token - BYTES_END - 1], []))
            else:
                parts[-1][1].append(token)
        return [(role, super(ChatByteTokenizer, self).decode(ids)) for role, ids in parts if role or ids]


_SPARE = 4
"""Tokens examined beyond the length of a stop string, since some tokens have no text."""
_CHARACTER = 4
"""Maximum bytes of a character. If a window begins within one, some tokenizers drop the characters after it."""


class Decoder(Protocol):
    """The decoding half of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of token ids."""
        ...


class StopFinder:
    """Detects that the last token of a response completes a stop string.

    A token with more than the end of the string, such as ``>\\n``, stays as it was sampled.
    """

    def __init__(self, tokenizer: Decoder, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._ends = frozenset(string[-1] for string in strings)
        self._window = max((len(string.encode("utf-8")) for string in strings), default=0) + _SPARE
        self._may_end: dict[int, bool] = {}

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """Return whether ``token_ids`` reach a stop string with their last token, and not before."""
        if not token_ids or not self._strings:
            return False
        last = token_ids[-1]
        may_end = self._may_end.get(last)
        if may_end is None:
            piece = self._tokenizer.decode([last], skip_special_tokens=False)
            # Part of a character shows as U+FFFD.
            may_end = self._may_end[last] = "\ufffd" in piece or not self._ends.isdisjoint(piece)
        if not may_end:
            return False
        for further in range(_CHARACTER):
            window = list(token_ids[-self._window - further :])
            text = self._tokenizer.decode(window, skip_special_tokens=False)
            if any(string in text for string in self._strings):
                return True
            if len(window) == len(token_ids) or "\ufffd" not in text:
                return False
        return False


def cut_at_stop(text: str, strings: Sequence[str]) -> tuple[str, bool]:
    """Cut a text after its first stop string; return it and whether there was one."""
    ends = [at + len(string) for string in strings if (at := text.find(string)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


_FILES = ("generation_config.json", "config.json")


class HasEnd(Protocol):
    """The part of a tokenizer used here."""

    eos_token_id: int | None


def find_end_ids(folder: str | Path, tokenizer: HasEnd | None) -> tuple[int, ...]:
    """Return the ids that end a response, each once: of the tokenizer, ``generation_config.json`` and ``config.json``.

    Chat models are inconsistent: Qwen2.5's tokenizer names ``<|im_end|>``, its generation settings ``<|endoftext|>``
    too; others lack one of the files. Whichever is sampled ends the response. The tokenizer's own comes first; ids that
    the model cannot write (negative, or beyond its ``vocab_size``) are left out. Empty if no source names one.
    """
    found: list[int] = []
    rows: list[int] = []
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    for name in _FILES:
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            config = json.loads(read_regular(Path(folder) / name))
            for part in (config, config.get("text_config") or {}):
                named = part.get("eos_token_id")
                found += [i for i in (named if isinstance(named, list) else [named]) if type(i) is int]
                rows += [i for i in [part.get("vocab_size")] if type(i) is int]
    limit = max(rows, default=sys.maxsize)
    return tuple(dict.fromkeys(i for i in found if 0 <= i < limit))


def require_end_ids(folder: str | Path, tokenizer: HasEnd | None) -> tuple[int, ...]:
    """Find ends as :func:`find_end_ids`. Raises SpearError if no source names an end token: no response would end."""
    found = find_end_ids(folder, tokenizer)
    if not found:
        raise SpearError(f"{folder} names no end token: set eos_token_id in its generation_config.json")
    return found


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
    ``version`` is the training step of the weights; None outside a training. ``seconds`` is how long the caller waited
    for it, None if unknown.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish
    served: Served | None = None
    cached_tokens: int | None = field(default=None, compare=False)
    version: int | None = field(default=None, compare=False)
    seconds: float | None = field(default=None, compare=False)


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
    """Return a seed in [0, 2**63) from the text of ``parts``; the same in every process and on every machine."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
