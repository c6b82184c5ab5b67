"""A model's tokenizer, its chat template, and the marks that end a message."""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

from spear_agents.engines.base import ByteTokenizer, Decoder
from spear_envs.core.errors import SpearError, one_line
from spear_envs.core.parsing import mend_text
from spear_envs.core.prompts import IMAGE

_LOOK_EVERY_S = 0.25
_lock = threading.Lock()
_due: dict[int, float] = {}
"""Moment, on the monotonic clock, at which the time of a thread is up."""
_pending = threading.Event()
_watched_by = -1
"""The process whose thread watches: a forked child has none."""


class _LateError(BaseException):
    """Not an Exception, which the code in question may catch."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when its time is up; code in C is interrupted only when it returns to Python."""
    global _watched_by
    thread = threading.get_ident()
    with _lock:
        if _watched_by != os.getpid():
            _watched_by = os.getpid()
            _due.clear()
            threading.Thread(target=_watch, name="deadlines", daemon=True).start()
        _due[thread] = time.monotonic() + seconds
        _pending.set()
    try:
        try:
            yield
        finally:
            with _lock:
                is_late = _due.pop(thread, None) is None
        while is_late:  # the error is on its way
            time.sleep(0.001)
    except _LateError:
        raise TimeoutError(f"it took more than {seconds:g} s") from None


def _watch() -> None:
    while _pending.wait():
        time.sleep(_LOOK_EVERY_S)
        with _lock:
            now = time.monotonic()
            for thread in [thread for thread, due in _due.items() if due < now]:
                del _due[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_LateError))
            if not _due:
                _pending.clear()


REMEMBERED_LINES = 16_384
LONGEST_REMEMBERED = 1024
"""Characters of a line."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which tokenizers of Llama 3 cut a text before they merge bytes.

A piece that holds a line break ends in one, since ``\\s*[\\r\\n]+`` goes before ``\\s+``.
"""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
"""Pattern of the tokenizers of Qwen2, Qwen2.5 and Qwen3."""
_LINE = re.compile(r".*?\n(?=[!-~])|.+", re.DOTALL)
"""Up to a line break before a visible ASCII character, which no later one joins or composes with."""

_FIELD = " ["
"""Start of a field. After a visible ASCII character its blank begins a piece in all of these patterns: only pieces of
blanks extend over one.
"""

Encode = Callable[[str], tuple[int, ...]]


def encode_by_line(encode: Encode, backend: Any) -> Encode:
    """Give ``encode`` a cache of lines if ``backend`` (a ``tokenizers.Tokenizer``) tokenises each by itself."""
    if not cuts_at_lines(json.loads(backend.to_str())):
        return encode
    remembered = lru_cache(REMEMBERED_LINES)(encode)

    def encode_lines(text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for line in _LINE.findall(text):
            for part in _cut_at_fields(line) if _FIELD in line else (line,):
                ids += remembered(part) if len(part) <= LONGEST_REMEMBERED else encode(part)
        return tuple(ids)

    return encode_lines


def _cut_at_fields(line: str) -> list[str]:
    """Split a line before its fields, each with the blank before its bracket."""
    parts: list[str] = []
    start = at = 0
    while (at := line.find(_FIELD, at + 1)) > 0:
        if "!" <= line[at - 1] <= "~":
            parts.append(line[start:at])
            start = at
    return [*parts, line[start:]]


def cuts_at_lines(description: dict[str, Any]) -> bool:
    """Return whether a tokenizer (``tokenizer.json``) gives a text the tokens of its lines one after the other."""
    normalizer, cutter = description.get("normalizer"), description.get("pre_tokenizer") or {}
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return False
    if any(
        token["lstrip"]
        or token["rstrip"]
        or token["single_word"]
        or "\n" in token["content"]
        or _FIELD in token["content"]
        for token in description.get("added_tokens", ())
    ):
        return False
    match cutter.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern in (LLAMA3, QWEN2) and (description.get("model") or {}).get("type") == "BPE"
    return False


Message = Mapping[str, Any]
_Key = TypeVar("_Key", str, tuple[int, ...])
_Value = TypeVar("_Value")

_TAKEN_KEYWORDS = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Keywords of ``apply_chat_template`` that are not variables of a template and are set by the caller."""
_REPLY = "\x02reply\x02"
_WORDS = ("alpha_word", "beta_word", "gamma_word", "delta_word", "epsilon_word")
"""Words by which a probe finds what a chat template shows."""
RENDER_S = 5.0
"""Seconds that a template may take: it comes with a model and may loop."""
_BROKEN_IMAGE = "< image>"
_CACHED_TEXTS = 4096
"""Distinct texts whose tokens are kept: boards and responses recur within a group and from turn to turn."""
_CACHED_LENGTH = 256
"""Longest text (in characters) or response (in tokens) worth keeping; longer ones hardly ever recur."""


class Tokenizer(Decoder, Protocol):
    """The part of a tokenizer used here; every Hugging Face tokenizer has it."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """Return the text of a conversation (called with ``tokenize=False``)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of a text."""
        ...


class Chat:
    """Text of messages, tokens of text, and text of responses, for one model.

    Raises SpearError if there is no chat template, or it does not use one of the variables.

    Args:
        tokenizer: any Hugging Face tokenizer with a chat template, or a
            :class:`~spear_agents.engines.base.ByteTokenizer`.
        stop_token_ids: ids besides the tokenizer's end token that may close a response
            (:func:`spear_agents.engines.base.find_end_ids`); a closing one is not part of its text.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}`` of Qwen3's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        _check_chat_template(tokenizer, self.template_kwargs)
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._closing = tuple(dict.fromkeys((*own, *stop_token_ids)))
        self._marks = _find_marks(tokenizer)
        self.encode: Callable[[str], tuple[int, ...]] = _cache_short(_make_encoder(tokenizer))
        """Token ids of a text, without special tokens added."""
        self._decode = _cache_short(self._decode_uncached)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **keywords: Any) -> str:
        """Apply the chat template to a conversation. Raises SpearError if it refuses the messages."""
        try:
            with within(RENDER_S):
                return str(
                    self.tokenizer.apply_chat_template(
                        list(messages),
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        **self.template_kwargs,
                        **keywords,
                    )
                )
        except Exception as error:  # a template is third-party code and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise SpearError(f"the model's chat template refuses messages of {roles} ({one_line(error)})") from error

    @cached_property
    def longest_token(self) -> int | None:
        """Most characters of one token, None if the tokenizer does not list its tokens: a text has no fewer tokens."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return max(map(len, getattr(self.tokenizer, "all_special_tokens", ())), default=1)
        list_tokens = getattr(self.tokenizer, "get_vocab", None)
        return max(map(len, list_tokens())) if list_tokens is not None else None

    def disarm(self, text: str) -> str:
        """Break up special tokens of the tokenizer (``<|im_end|>``) in a text.

        A passage, a page or a program's output could otherwise end a message and begin another.
        """
        return self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text) if self._marks else text

    def disarm_all(self, value: Any) -> Any:
        """Break up special tokens, and places of pictures, in every text of a message or a schema, keys included."""
        if isinstance(value, str):
            return self.disarm(disarm_places(value))
        if isinstance(value, Mapping):
            return {self.disarm_all(key): self.disarm_all(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.disarm_all(part) for part in value]
        return value

    def decode(self, response_ids: Sequence[int]) -> str:
        """Return the text of a response without its closing stop token; other special tokens stay visible."""
        return self._decode(tuple(response_ids))

    def _decode_uncached(self, response_ids: tuple[int, ...]) -> str:
        if response_ids and response_ids[-1] in self._closing:
            response_ids = response_ids[:-1]
        return self.tokenizer.decode(list(response_ids), skip_special_tokens=False)

    @property
    def end_id(self) -> int | None:
        """The end token that the chat template writes, else the tokenizer's own, else None."""
        written = [i for i in self._closing if self._decode_end(i) == self._written_end]
        return next(iter((*written, *self._closing)), None)

    def _decode_end(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template shows system messages."""
        return self._shows([{"role": "system", "content": _WORDS[0]}, {"role": "user", "content": _WORDS[1]}])

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools, their calls and their results."""
        schema = {"type": "object", "properties": {_WORDS[1]: {"type": "string", "description": "x"}}}
        tool = {"name": _WORDS[0], "description": "x", "parameters": schema}
        asked: list[Message] = [{"role": "user", "content": _WORDS[3]}]
        return self._shows(asked, tools=[{"type": "function", "function": tool}]) and self._shows(_probe_calls(1))

    @cached_property
    def takes_several(self) -> bool:
        """Whether the chat template shows a message with several calls."""
        return self._shows(_probe_calls(2))

    def _shows(self, messages: list[Message], **keywords: Any) -> bool:
        """Return whether the chat template accepts messages and shows all their words."""
        given = json.dumps([messages, keywords])
        try:
            text = self.render(messages, **keywords)
        except SpearError:
            return False
        return all(word in text for word in _WORDS if word in given)

    @cached_property
    def _written_end(self) -> str:
        """The mark that the chat template writes after a response, or an empty text."""
        probe: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _REPLY}]
        _, found, rest = self.render(probe, add_generation_prompt=False).rpartition(_REPLY)
        written = self._marks.match(rest) if self._marks is not None and found else None
        ends = (mark for mark in map(self._decode_end, self._closing) if mark and rest.startswith(mark))
        return written[0] if written is not None else next(ends, "")

    @cached_property
    def end_marks(self) -> tuple[str, ...]:
        """Texts that end a response, the chat template's first."""
        marks = (self._written_end, *map(self._decode_end, self._closing))
        return tuple(dict.fromkeys(mark for mark in marks if mark))

    def starts_with_end(self, text: str) -> bool:
        """Return whether ``text``, which follows a response, ends it as the chat template does."""
        return not self._written_end or text.startswith(self.end_marks)

    def drop_end(self, text: str) -> str:
        """Strip the end mark at the start of ``text``, which follows a response with its own mark."""
        return text.removeprefix(next((mark for mark in self.end_marks if text.startswith(mark)), ""))


def _probe_calls(times: int) -> list[Message]:
    """Return messages with calls of a tool and their results."""
    called = {"name": _WORDS[0], "arguments": {_WORDS[1]: _WORDS[2]}}
    ids = [f"call0000{number}" for number in range(times)]
    calls = [{"type": "function", "id": name, "function": called} for name in ids]
    results = [{"role": "tool", "content": _WORDS[4], "tool_call_id": name} for name in ids]
    return [{"role": "user", "content": _WORDS[3]}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def disarm_places(text: str) -> str:
    """Break up the mark of a picture's place, as of other tokens: only the template decides where a picture goes."""
    return text.replace(IMAGE, _BROKEN_IMAGE)


def check_taken_keywords(keywords: Iterable[str]) -> None:
    """Raise SpearError if a keyword cannot be a variable of a chat template."""
    taken = sorted(_TAKEN_KEYWORDS.intersection(keywords))
    if taken:
        raise SpearError(f"{taken[0]} is an argument of apply_chat_template, not a variable of a template")


def _check_chat_template(tokenizer: Tokenizer, keywords: Mapping[str, Any]) -> None:
    check_taken_keywords(keywords)
    if not getattr(tokenizer, "chat_template", True):
        raise SpearError("the model's tokenizer has no chat template: take a chat (instruct) version of the model")
    if not keywords:
        return
    if isinstance(tokenizer, ByteTokenizer):
        raise SpearError(f"{', '.join(keywords)}: only the chat template of a local model takes keywords")
    source = str(getattr(tokenizer, "chat_template", ""))
    for name in keywords:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise SpearError(f"the chat template of this tokenizer does not use {name!r}: leave it out")


def _cache_short(function: Callable[[_Key], _Value]) -> Callable[[_Key], _Value]:
    """Remember the results for short arguments."""
    remembered = lru_cache(_CACHED_TEXTS)(function)
    return lambda key: remembered(key) if len(key) <= _CACHED_LENGTH else function(key)


def _find_marks(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Match a tokenizer's special tokens, except the placeholder of a picture; None if there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marks = {*getattr(tokenizer, "all_special_tokens", ()), *(token.content for token in added if token.special)}
    longest_first = sorted((mark for mark in marks if len(mark) > 1 and mark != IMAGE), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _make_encoder(tokenizer: Tokenizer) -> Callable[[str], tuple[int, ...]]:
    """Return ``text -> ids`` without added special tokens; a fast tokenizer's backend saves four fifths of the call.

    Texts are mended: a policy that escapes half an emoji in a call must not end the run.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return lambda text: tuple(tokenizer.encode(text))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tuple(tokenizer.encode(mend_text(text), add_special_tokens=False))
    # An earlier call may have left truncation or padding switched on in the backend.
    backend.no_truncation()
    backend.no_padding()
    encode = encode_by_line(lambda text: tuple(backend.encode(text, add_special_tokens=False).ids), backend)
    return lambda text: encode(mend_text(text))
