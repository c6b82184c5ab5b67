"""From an environment's text to prompt token ids, in either layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np

from spear_agents.engines.base import Finish
from spear_agents.engines.bytes import ByteTokenizer
from spear_agents.line_encoding import encode_by_line
from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import IMAGE, PromptContext, PromptTemplate, RunningTemplate

Message = Mapping[str, str]
_Key = TypeVar("_Key", str, tuple[int, ...])
_Value = TypeVar("_Value")

_BROKEN_IMAGE = "< image>"
_TAKEN_KEYWORDS = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Keywords of ``apply_chat_template`` that are no variables of a template; they are set where it is called."""
_PROBES = ("x", " \n a <b> {{ c }}\n\n", "")
"""Contents by which a chat template proves that it passes text through: blanks at both ends, markup, nothing at all."""

_CACHED_TEXTS = 4096
"""Distinct texts whose tokens are kept: boards and responses recur within a group and from turn to turn."""
_CACHED_LENGTH = 256
"""Longest text (in characters) or response (in tokens) worth keeping; longer ones hardly ever recur."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; every Hugging Face tokenizer has it."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """The text of a conversation (called with ``tokenize=False``)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of token ids."""
        ...


class Overlong(str, Enum):
    """What happens to a prompt that is longer than ``max_prompt_tokens``."""

    END = "end"
    """The episode ends as ``context_limit``."""
    DROP_HISTORY = "drop-history"
    """The oldest turns of the history are left out until it fits, and the record counts them (``per_turn`` only)."""


@dataclass(frozen=True)
class Prompt:
    """One turn's prompt: ``ids`` go to the engine, ``new_ids`` into the record (see
    :class:`spear_agents.trajectory.Turn`).
    """

    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    shows_image: bool
    """The text holds the placeholder of a picture."""
    room: int | None = None
    """Tokens that the response may have at most, where a conversation's length is limited."""
    dropped_turns: int = 0
    """Turns of the history that were left out for its length."""


class PromptBuilder:
    """Makes prompts for one policy: a tokenizer with its chat template, a prompt template, a layout.

    The chat template is rendered once for each kind of message; later texts are set between its fixed parts and
    tokenised as a whole, so tokens never differ from ``apply_chat_template``'s.  A chat template that rewrites
    contents (strips them, say) is noticed and rendered for every prompt instead.

    Args:
        tokenizer: any Hugging Face tokenizer with a chat template, or
        :class:`spear_agents.engines.bytes.ByteTokenizer`. template: an environment's prompt template
        (``env.unwrapped.templates``). The conversation of a
            :class:`~spear_envs.core.prompts.RunningTemplate` goes on without the chat template's frame, except behind
            a response in which the model itself ended its message.
        layout: see :class:`~spear_agents.trajectory.Layout`.
        history: pairs of observation and action shown in ``per_turn`` prompts (the paper shows 2).
        max_prompt_tokens: longest sequence sent to the engine; None for no limit.
        max_row_tokens: most tokens of a conversation after its first prompt, the environment's included; None for no
            limit. With it ``max_prompt_tokens`` is a limit of the first prompt alone.
        stop_token_ids: ids besides the tokenizer's end token that may close a response
            (:func:`spear_agents.end_tokens.find_end_ids`); a closing one is not part of its text.
        overlong: what happens to a prompt beyond ``max_prompt_tokens``.
        mark_image: the text that stands for a picture in a local model's sequence: of
            :meth:`spear_agents.engines.vision.ImageReader.mark`, or of :func:`find_image_mark` where the engine itself
            puts in as many image tokens as it needs; None leaves ``<image>`` in its place, as engines that send
            messages want it.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}`` of Qwen3's.

    Raises:
        SpearError: no chat template, one that refuses the messages or does not read one of the variables, or a
            conversation that is to drop its history.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: PromptTemplate,
        layout: Layout | str = Layout.PER_TURN,
        history: int = 2,
        max_prompt_tokens: int | None = None,
        max_row_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        overlong: Overlong | str = Overlong.END,
        mark_image: Callable[[np.ndarray], str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if history < 0:
            raise ValueError(f"history must be >= 0, got {history}")
        self.overlong = Overlong(overlong)
        if self.overlong is Overlong.DROP_HISTORY and Layout(layout) is Layout.CONVERSATION:
            raise SpearError("a conversation cannot drop its history: use layout per_turn, or overlong=end")
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        _check_chat_template(tokenizer, self.template_kwargs)
        self.template = template
        self.stop_strings = template.stop_strings if isinstance(template, RunningTemplate) else ()
        self.layout = Layout(layout)
        self.history = history
        self.max_prompt_tokens = max_prompt_tokens
        self.max_row_tokens = max_row_tokens
        self.mark_image = mark_image
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._closing = tuple(dict.fromkeys((*own, *stop_token_ids)))
        self._encode = _cache_short(_make_encoder(tokenizer))
        self._marks = _find_marks(tokenizer)
        self._decode = _cache_short(self._decode_uncached)
        system = template.system()
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._opening = self._find_frame(self._system, "")
        reply = "\x02reply\x02"
        before: list[Message] = [
            *self._system,
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": reply},
        ]
        self._continuation = self._find_frame(before, reply) if self.layout is Layout.CONVERSATION else None
        self._before = before
        self._reply = reply

    def begin(self) -> Dialogue:
        """The prompts of one episode."""
        return Dialogue(self)

    def with_template(self, template: PromptTemplate) -> PromptBuilder:
        """The same builder with other words, whose system message and stop strings must be those of its own."""
        other = copy(self)
        other.template = template
        return other

    def ask(self, text: str) -> tuple[int, ...]:
        """The prompt of a single message, outside an episode."""
        return self._encode(self._render([{"role": "user", "content": self._disarm(disarm_places(text))}]))

    def first(self, context: PromptContext, picture: np.ndarray | None = None) -> Prompt:
        """The prompt of a ``per_turn`` turn, or the first of a conversation."""
        text, shows_image = self._write(self.template.render(disarm_context(context)), picture)
        ids = self._encode(self._set_in(self._opening, self._system, "", text))
        return Prompt(ids, ids, shows_image)

    def follow_up(self, context: PromptContext, finish: Finish, picture: np.ndarray | None = None) -> Prompt:
        """What a conversation gains after a response: its end mark if the response lacks one, and the next message.

        A response that ended with another end token than the chat template's keeps it and gets no second one.
        """
        text, shows_image = self._write(self.template.follow_up(disarm_context(context)), picture)
        if self.stop_strings and finish is not Finish.STOP:
            ids = self._encode(text)
            return Prompt(ids, ids, shows_image)
        added = self._set_in(self._continuation, self._before, self._reply, text)
        if finish is Finish.STOP:
            added = added.removeprefix(next((mark for mark in self._end_marks if added.startswith(mark)), ""))
        ids = self._encode(added)
        return Prompt(ids, ids, shows_image)

    def _write(self, text: str, picture: np.ndarray | None) -> tuple[str, bool]:
        """A message as the tokenizer gets it, and whether it has the place of a picture."""
        text = self._disarm(text)
        places = text.count(IMAGE)
        if places > 1:
            raise SpearError(f"the template {self.template.name!r} marks {places} places of a picture, not one")
        if places and picture is not None and self.mark_image is not None:
            text = text.replace(IMAGE, self.mark_image(picture))
        return text, bool(places)

    def _disarm(self, text: str) -> str:
        """Breaks up what the tokenizer would take for its own marks (``<|im_end|>``).

        A passage, a page or what a program printed could otherwise end a message and begin another.
        """
        return self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text) if self._marks else text

    @property
    def measure(self) -> Callable[[str], int] | None:
        """Counts the tokens of a text; None for bytes, which are no measure of what a policy can read."""
        return None if isinstance(self.tokenizer, ByteTokenizer) else lambda text: len(self._encode(text))

    def decode(self, response_ids: Sequence[int]) -> str:
        """Text of a response without its closing stop token; other special tokens stay visible."""
        return self._decode(tuple(response_ids))

    def _decode_uncached(self, response_ids: tuple[int, ...]) -> str:
        if response_ids and response_ids[-1] in self._closing:
            response_ids = response_ids[:-1]
        return self.tokenizer.decode(list(response_ids), skip_special_tokens=False)

    @property
    def end_id(self) -> int | None:
        """The end token that the chat template writes, else the tokenizer's own; None where there is none."""
        written = [i for i in self._closing if self._end_marks[:1] == (self._decode_end(i),)]
        return next(iter((*written, *self._closing)), None)

    def _decode_end(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    @cached_property
    def _end_marks(self) -> tuple[str, ...]:
        """Texts that end a response: what the chat template writes comes first, if it writes one."""
        _, found, rest = self._render(self._before, add_generation_prompt=False).rpartition(self._reply)
        written = self._marks.match(rest) if self._marks is not None and found else None
        marks = [mark for mark in map(self._decode_end, self._closing) if mark]
        first = [written[0]] if written is not None else [mark for mark in marks if rest.startswith(mark)]
        return tuple(dict.fromkeys((*first, *marks)))

    def _render(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self.template_kwargs
            )
        except Exception as error:  # a template is a program of strangers: it may refuse with anything
            roles = ", ".join(message["role"] for message in messages)
            raise SpearError(
                f"the chat template of this tokenizer refuses messages of {roles} ({' '.join(str(error).split())}): "
                "take another model, prompt template or --layout"
            ) from error

    def _render_after(self, before: list[Message], marker: str, content: str) -> str:
        text = self._render([*before, {"role": "user", "content": content}])
        if not marker:
            return text
        _, found, rest = text.rpartition(marker)
        if not found:
            raise SpearError(
                "the chat template of this tokenizer rewrites earlier responses, so a conversation cannot be continued "
                "token by token: use layout per_turn"
            )
        return rest

    def _find_frame(self, before: list[Message], marker: str) -> tuple[str, str] | None:
        """What the chat template puts before and after a user message, or None if it depends on the message."""
        seed = "\x02content\x02"
        head, found, tail = self._render_after(before, marker, seed).partition(seed)
        if not found:
            return None
        passed = all(self._render_after(before, marker, probe) == head + probe + tail for probe in _PROBES)
        return (head, tail) if passed else None

    def _set_in(self, frame: tuple[str, str] | None, before: list[Message], marker: str, content: str) -> str:
        if frame is None:
            return self._render_after(before, marker, content)
        return f"{frame[0]}{content}{frame[1]}"


class Dialogue:
    """The prompts of one episode in their order."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._past: list[tuple[str, str]] = []
        self._ids: tuple[int, ...] = ()
        self._finish: Finish | None = None
        self._opening = 0

    def next(
        self,
        *,
        instruction: str,
        observation: str,
        admissible_actions: Sequence[str] | None,
        turn: int,
        max_turns: int,
        picture: np.ndarray | None = None,
    ) -> Prompt | None:
        """The prompt of turn ``turn`` (from 1), or None if there is no room for it or for a response to it.

        ``picture`` is what the observation shows besides its text, uint8 [height, width, 3].
        """
        builder = self._builder
        history = self._past[-builder.history :] if builder.history else []
        context = PromptContext(
            instruction=instruction,
            observation=observation,
            admissible_actions=admissible_actions,
            history=history,
            turn=turn,
            max_turns=max_turns,
        )
        if builder.layout is Layout.PER_TURN or self._finish is None:
            drop = builder.overlong is Overlong.DROP_HISTORY
            prompt = self._shorten(context, picture) if drop else builder.first(context, picture)
            self._opening = len(prompt.ids)
        else:
            added = builder.follow_up(context, self._finish, picture)
            prompt = replace(added, ids=self._ids + added.new_ids)
        limited = builder.layout is Layout.CONVERSATION and builder.max_row_tokens is not None
        checked = self._opening if limited else len(prompt.ids)
        if builder.max_prompt_tokens is not None and checked > builder.max_prompt_tokens:
            return None
        if limited:
            room = self._opening + (builder.max_row_tokens or 0) - len(prompt.ids)
            if room <= 0:
                return None
            prompt = replace(prompt, room=room)
        self._ids = prompt.ids
        return prompt

    def _shorten(self, context: PromptContext, picture: np.ndarray | None) -> Prompt:
        """The prompt with as many of the latest turns as fit; without any where even that is too long."""
        limit = self._builder.max_prompt_tokens
        for dropped in range(len(context.history) + 1):
            prompt = self._builder.first(replace(context, history=context.history[dropped:]), picture)
            if limit is None or len(prompt.ids) <= limit:
                break
        return replace(prompt, dropped_turns=dropped)

    def add(self, observation: str, action: str, response_ids: tuple[int, ...], finish: Finish) -> None:
        """Records a turn: what was seen, what was done, the sampled tokens and how they ended."""
        self._past.append((observation, action))
        if self._builder.layout is Layout.CONVERSATION:
            self._ids += response_ids
            self._finish = finish


def disarm_places(text: str) -> str:
    """The text with the mark of a picture's place broken up, as a tokenizer's own marks are.

    A page or a file may hold the word, and a model may write it; where a picture goes is for the template to say.
    """
    return text.replace(IMAGE, _BROKEN_IMAGE)


def disarm_context(context: PromptContext) -> PromptContext:
    """The slots of a prompt without a picture's place in any of them (:func:`disarm_places`)."""
    actions = context.admissible_actions
    return replace(
        context,
        instruction=disarm_places(context.instruction),
        observation=disarm_places(context.observation),
        admissible_actions=None if actions is None else [disarm_places(action) for action in actions],
        history=[(disarm_places(seen), disarm_places(action)) for seen, action in context.history],
    )


def check_taken_keywords(keywords: Iterable[str]) -> None:
    """Raises SpearError where a keyword is none that a chat template could read as its variable."""
    taken = sorted(_TAKEN_KEYWORDS.intersection(keywords))
    if taken:
        raise SpearError(
            f"{taken[0]} is no variable of a chat template but an argument of apply_chat_template, which is set here: "
            "leave it out"
        )


def _check_chat_template(tokenizer: Tokenizer, keywords: Mapping[str, Any]) -> None:
    check_taken_keywords(keywords)
    if not getattr(tokenizer, "chat_template", True):
        raise SpearError(
            "the model's tokenizer has no chat template: take a chat (instruct) version of the model, or save a "
            "template as chat_template.jinja in its folder"
        )
    if not keywords:
        return
    if isinstance(tokenizer, ByteTokenizer):
        raise SpearError(f"{', '.join(keywords)}: only the chat template of a local model takes keywords")
    source = str(getattr(tokenizer, "chat_template", ""))
    for name in keywords:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise SpearError(f"the chat template of this tokenizer reads no variable {name!r}: leave it out")


def find_image_mark(tokenizer: Tokenizer) -> str:
    """What a chat template writes for a picture between two texts, such as Qwen's ``<|image_pad|>`` and its frame.

    ``<image>`` where the template knows no pictures.
    """
    seed = "\x02"
    parts = [{"type": "text", "text": seed}, {"type": "image"}, {"type": "text", "text": seed}]
    try:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)  # type: ignore[dict-item]
    except Exception:  # a template is a program of strangers, and most are for texts
        return IMAGE
    pieces = str(rendered).split(seed)
    return pieces[1] if len(pieces) == 3 and pieces[1].strip() and "image" in pieces[1].lower() else IMAGE


def _cache_short(function: Callable[[_Key], _Value]) -> Callable[[_Key], _Value]:
    """Remembers the results for short arguments."""
    remembered = lru_cache(_CACHED_TEXTS)(function)
    return lambda key: remembered(key) if len(key) <= _CACHED_LENGTH else function(key)


def _find_marks(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds the texts of a tokenizer's special tokens, but for the placeholder of a picture; None if it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marks = {*getattr(tokenizer, "all_special_tokens", ()), *(token.content for token in added if token.special)}
    longest_first = sorted((mark for mark in marks if len(mark) > 1 and mark != IMAGE), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _make_encoder(tokenizer: Tokenizer) -> Callable[[str], tuple[int, ...]]:
    """``text -> ids`` without special tokens added; a fast tokenizer's own backend saves four fifths of the call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    # Truncation and padding are settings of the backend that some earlier call may have left behind.
    backend.no_truncation()
    backend.no_padding()
    return encode_by_line(lambda text: tuple(backend.encode(text, add_special_tokens=False).ids), backend)
