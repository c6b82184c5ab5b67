"""From an environment's text to prompt token ids, in either layout."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from spear_agents.engines.base import ByteTokenizer, ContextExceededError, Finish
from spear_agents.play.chat import RENDER_S, Chat, Message, Tokenizer, disarm_places, within
from spear_agents.play.trajectory import Layout
from spear_agents.play.transcript import Asked, Transcript
from spear_envs.core.env import image_of, text_of
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import IMAGE, PromptContext, PromptTemplate, RunningTemplate

_PROBES = ("x", " \n a <b> {{ c }}\n\n", "")
"""Contents that a chat template must pass through: blanks at both ends, markup, an empty text."""
_REPLIES = ("x", "<think>t</think><action>a</action>", "<think>\nt\n</think>\n\na")
"""Responses that a chat template must keep as they were written."""
_BLANK_REPLY = " x\n"
"""A response that many templates strip."""
_QUESTION: Message = {"role": "user", "content": "x"}
_MARKER = "\x02reply\x02"
_WORD = "content"
"""Content that any chat template shows, even one that escapes characters."""
_log = logging.getLogger(__name__)


class Overlong(str, Enum):
    """What to do with a prompt longer than ``max_prompt_tokens``."""

    END = "end"
    """The episode ends as ``context_limit``."""
    DROP_HISTORY = "drop-history"
    """The oldest turns are dropped until the prompt fits, and counted in the record (``per_turn`` only)."""


@dataclass(frozen=True)
class Prompt:
    """One turn's prompt: ``ids`` go to the engine, ``new_ids`` into the record (see
    :class:`spear_agents.play.trajectory.Turn`).
    """

    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    shows_image: bool
    """The text holds the placeholder of a picture."""
    room: int | None = None
    """Maximum tokens of the response, if a conversation's length is limited."""
    dropped_turns: int = 0
    """Turns of the history dropped for length."""
    follows: int | None = None
    """Index of the turn (from 0) whose response ``new_ids`` follow; None if they are the full prompt."""


class PromptBuilder:
    """Builds prompts for one policy: a tokenizer with its chat template, a prompt template, a layout.

    The chat template is rendered once for each kind of message; later texts go between its fixed parts and the result
    is tokenised at once, so tokens never differ from ``apply_chat_template``'s. A chat template that rewrites contents
    (strips them, say) is detected and rendered for every prompt.

    Args:
        tokenizer: any Hugging Face tokenizer with a chat template, or
            :class:`spear_agents.engines.base.ByteTokenizer`.
        template: an environment's prompt template (``env.unwrapped.templates``). The conversation of a
            :class:`~spear_envs.core.prompts.RunningTemplate` continues without the chat template's frame, except after
            a response in which the model itself ended its message.
        layout: see :class:`~spear_agents.play.trajectory.Layout`.
        history: pairs of observation and action shown in ``per_turn`` prompts (the paper shows 2).
        max_prompt_tokens: longest sequence sent to the engine; None for no limit.
        max_row_tokens: maximum tokens of a conversation after its first prompt, including the environment's; None for
            no limit. With it ``max_prompt_tokens`` limits the first prompt only.
        stop_token_ids: ids besides the tokenizer's end token that may close a response
            (:func:`spear_agents.engines.base.find_end_ids`); a closing one is not part of its text.
        overlong: what to do with a prompt beyond ``max_prompt_tokens``.
        mark_image: the text of a picture in a local model's sequence, from
            :meth:`spear_agents.engines.vision.ImageReader.mark`, or from :func:`find_image_mark` if the engine alone
            knows their number; None leaves ``<image>``, as engines that send messages need it.
        template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}`` of Qwen3's.

    Raises:
        SpearError: a missing chat template, one that refuses the messages or does not use one of the variables, or a
            conversation that is to drop its history.

    A chat template that rewrites earlier responses (``rewrites``) is given the full conversation at every turn; the
    prompt continues the tokens of the last turn only if it shows them unchanged
    (:class:`~spear_agents.play.transcript.Transcript`).
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
        self.chat = Chat(tokenizer, stop_token_ids, template_kwargs)
        self.template = template
        self.stop_strings = template.stop_strings if isinstance(template, RunningTemplate) else ()
        self.layout = Layout(layout)
        self.history = history
        self.max_prompt_tokens = max_prompt_tokens
        self.max_row_tokens = max_row_tokens
        self.mark_image = mark_image
        self._measure: Callable[[str], int] | None = None
        self.drops: Sequence[int] = ()
        """By turn, how much of the history an episode that is played again left out."""
        system = template.system()
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._opening = self._find_frame(self._system, "")
        self._before: list[Message] = [*self._system, _QUESTION, {"role": "assistant", "content": _MARKER}]
        in_frames = self.layout is Layout.CONVERSATION
        in_messages = in_frames and not self.stop_strings
        self.splits = in_messages and not all(map(self._keeps, _REPLIES))
        """Whether the chat template changes every earlier response, or those with thoughts.

        Text that continues within one message does not count.
        """
        self.rewrites = self.splits or (in_messages and not self._keeps(_BLANK_REPLY))
        """Whether it changes some earlier responses; a few only those with blanks at their ends."""
        self._continuation = self._find_frame(self._before, _MARKER) if in_frames and not self.rewrites else None
        if self.rewrites:
            _log.warning("the chat template rewrites earlier responses: such a turn begins a training row of its own")

    def begin(self, history: Sequence[tuple[str, str]] | None = None) -> Dialogue:
        """Begin the prompts of one episode, after ``history``. Raises SpearError for a conversation with one."""
        if history is not None and self.layout is Layout.CONVERSATION:
            raise SpearError("a conversation cannot begin in a snapshot, which lacks its tokens: use layout per_turn")
        return Dialogue(self, history or ())

    def with_template(self, template: PromptTemplate) -> PromptBuilder:
        """Return a copy with another template, whose system message and stop strings must be equal."""
        other = copy(self)
        other.template = template
        return other

    def with_drops(self, drops: Sequence[int]) -> PromptBuilder:
        """Return a copy that leaves as many turns out of the history of each prompt as a record says."""
        other = copy(self)
        other.drops = drops
        return other

    def with_measure(self, measure: Callable[[str], int] | None) -> PromptBuilder:
        """Return a copy that counts tokens as ``measure`` does, for episodes of another tokenizer."""
        other = copy(self)
        other._measure = measure
        return other

    def ask(self, text: str) -> tuple[int, ...]:
        """Return the prompt of a single message, outside an episode."""
        return self.chat.encode(self.chat.render([{"role": "user", "content": self.chat.disarm(disarm_places(text))}]))

    def first(self, context: PromptContext, picture: np.ndarray | None = None) -> Prompt:
        """Return the prompt of a ``per_turn`` turn, or the first of a conversation."""
        text, shows_image = self._write(self.template.render(disarm_context(context)), picture)
        ids = self.chat.encode(self._set_in(self._opening, self._system, "", text))
        return Prompt(ids, ids, shows_image)

    def follow_up(self, context: PromptContext, finish: Finish, picture: np.ndarray | None = None) -> Prompt:
        """Return what follows a response in a conversation: an end mark if it lacks one, and the next message.

        A response that ended with another end token than the chat template's keeps it and gets no second one.
        """
        text, shows_image = self._write(self.template.follow_up(disarm_context(context)), picture)
        if self.stop_strings and finish is not Finish.STOP:
            ids = self.chat.encode(text)
            return Prompt(ids, ids, shows_image)
        added = self._set_in(self._continuation, self._before, _MARKER, text)
        if finish is Finish.STOP:
            added = self.chat.drop_end(added)
        ids = self.chat.encode(added)
        return Prompt(ids, ids, shows_image)

    def _write(self, text: str, picture: np.ndarray | None) -> tuple[str, bool]:
        """Return a message for the tokenizer, and whether it has the place of a picture."""
        text = self.chat.disarm(text)
        places = text.count(IMAGE)
        if places > 1:
            raise SpearError(f"the template {self.template.name!r} marks {places} places of a picture, not one")
        if places and picture is not None and self.mark_image is not None:
            text = text.replace(IMAGE, self.mark_image(picture))
        return text, bool(places)

    @property
    def measure(self) -> Callable[[str], int] | None:
        """Function that counts the tokens of a text; None for bytes, which do not measure what a policy can read."""
        if self._measure is not None or isinstance(self.tokenizer, ByteTokenizer):
            return self._measure
        return lambda text: len(self.chat.encode(text))

    def decode(self, response_ids: Sequence[int]) -> str:
        """Return the text of a response without its closing stop token; other special tokens stay visible."""
        return self.chat.decode(response_ids)

    def _render_after(self, before: list[Message], marker: str, content: str) -> str:
        text = self.chat.render([*before, {"role": "user", "content": content}])
        if not marker:
            return text
        _, found, rest = text.rpartition(marker)
        if not found:
            raise SpearError("the chat template of this tokenizer drops earlier responses: use layout per_turn")
        return rest

    def _keeps(self, reply: str) -> bool:
        """Return whether the chat template keeps this response unchanged in a later prompt."""
        asked = [*self._system, _QUESTION]
        later = self.chat.render([*asked, {"role": "assistant", "content": reply}, _QUESTION])
        return later.startswith(self.chat.render(asked) + reply)

    def _find_frame(self, before: list[Message], marker: str) -> tuple[str, str] | None:
        """Return the template's text before and after a user message, or None if it depends on the message."""
        seed = "\x02content\x02"
        head, found, tail = self._render_after(before, marker, seed).partition(seed)
        if not found:
            if _WORD not in self._render_after(before, marker, _WORD):
                raise SpearError("the chat template of this tokenizer drops messages of user: take another model")
            return None
        passed = all(self._render_after(before, marker, probe) == head + probe + tail for probe in _PROBES)
        return (head, tail) if passed else None

    def _set_in(self, frame: tuple[str, str] | None, before: list[Message], marker: str, content: str) -> str:
        if frame is None:
            return self._render_after(before, marker, content)
        return f"{frame[0]}{content}{frame[1]}"


class Dialogue:
    """The prompts of one episode in order; ``past`` are observation and action of turns before the first."""

    def __init__(self, builder: PromptBuilder, past: Sequence[tuple[str, str]] = ()) -> None:
        self._builder = builder
        self._past = list(past)
        self._ids: tuple[int, ...] = ()
        self._finish: Finish | None = None
        self._opening = 0
        self._written = _Written(builder) if builder.rewrites else None

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
        """Return the prompt of turn ``turn`` (from 1), or None if there is no room for it or for a response to it.

        ``picture`` is what the observation shows besides its text, uint8 [height, width, 3].
        """
        builder = self._builder
        history = self.recall()
        if turn <= len(builder.drops):
            history = history[builder.drops[turn - 1] :]
        context = PromptContext(
            instruction=instruction,
            observation=observation,
            admissible_actions=admissible_actions,
            history=history,
            turn=turn,
            max_turns=max_turns,
            picture=picture is not None,
        )
        if self._written is not None:
            return self._written.ask(context, picture)
        if builder.layout is Layout.PER_TURN or self._finish is None:
            drop = builder.overlong is Overlong.DROP_HISTORY
            prompt = self._shorten(context, picture) if drop else builder.first(context, picture)
            self._opening = len(prompt.ids)
        else:
            added = builder.follow_up(context, self._finish, picture)
            prompt = replace(added, ids=self._ids + added.new_ids, follows=len(self._past) - 1)
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

    def recall(self) -> tuple[tuple[str, str], ...]:
        """Return the observation and action of the turns that the next prompt may show."""
        window = self._builder.history
        return tuple(self._past[-window:]) if window else ()

    def _shorten(self, context: PromptContext, picture: np.ndarray | None) -> Prompt:
        """Return the prompt with as many of the latest turns as fit, possibly none."""
        limit = self._builder.max_prompt_tokens
        for dropped in range(len(context.history) + 1):
            prompt = self._builder.first(replace(context, history=context.history[dropped:]), picture)
            if limit is None or len(prompt.ids) <= limit:
                break
        return replace(prompt, dropped_turns=dropped)

    def add(self, observation: str, action: str, response_ids: tuple[int, ...], finish: Finish) -> None:
        """Record a turn: observation, action, sampled tokens and how they ended."""
        if self._written is not None:
            self._written.add(response_ids, finish)
        self._past.append((observation, action))
        if self._builder.layout is Layout.CONVERSATION:
            self._ids += response_ids
            self._finish = finish


class _Written:
    """A conversation whose chat template rewrites earlier responses, rendered again at every turn."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._transcript = Transcript(builder.chat, builder.max_prompt_tokens, builder.max_row_tokens)
        self._messages = [dict(message) for message in builder._system]
        self._asked: Asked | None = None
        self._runs_on = False

    def ask(self, context: PromptContext, picture: np.ndarray | None) -> Prompt | None:
        """Return the next prompt, or None if there is no room for it or for a response to it."""
        template = self._builder.template
        words = template.render if self._asked is None else template.follow_up
        text, shows_image = self._builder._write(words(disarm_context(context)), picture)
        if shows_image:
            raise SpearError("the chat template rewrites earlier responses and pictures: use layout per_turn")
        if self._runs_on:
            self._messages[-1]["content"] += text
        else:
            self._messages.append({"role": "user", "content": text})
        try:
            self._asked = asked = self._transcript.ask(self._messages, goes_on=self._runs_on)
        except ContextExceededError:
            return None
        return Prompt(asked.ids, asked.new_ids, False, asked.room, follows=asked.follows)

    def add(self, response_ids: tuple[int, ...], finish: Finish) -> None:
        """Record the response to the last prompt."""
        assert self._asked is not None
        text = self._builder.chat.disarm(self._transcript.add(self._asked, response_ids, finish))
        if self._runs_on:
            self._messages[-1]["content"] += text
        else:
            self._messages.append({"role": "assistant", "content": text})
        self._runs_on = bool(self._builder.stop_strings) and finish is not Finish.STOP


def shows_picture(env: Any, template: PromptTemplate) -> bool:
    """Return whether the first prompt of an environment, which is reset, has a picture."""
    observation, info = env.reset(seed=0)
    context = PromptContext(
        instruction=info["instruction"],
        observation=text_of(observation),
        admissible_actions=info["admissible_actions"],
        history=(),
        turn=1,
        max_turns=env.unwrapped.max_turns,
        picture=image_of(observation) is not None,
    )
    return IMAGE in template.render(disarm_context(context))


def disarm_context(context: PromptContext) -> PromptContext:
    """Return the slots of a prompt without a picture's place in any of them (:func:`disarm_places`)."""
    actions = context.admissible_actions
    return replace(
        context,
        instruction=disarm_places(context.instruction),
        observation=disarm_places(context.observation),
        admissible_actions=None if actions is None else [disarm_places(action) for action in actions],
        history=[(disarm_places(seen), disarm_places(action)) for seen, action in context.history],
    )


def find_image_mark(tokenizer: Tokenizer) -> str:
    """Find what a chat template writes for a picture, such as Mistral's ``[IMG]``, else ``<image>``."""
    seed = "\x02"
    parts = [{"type": "text", "text": seed}, {"type": "image"}, {"type": "text", "text": seed}]
    try:
        with within(RENDER_S):
            rendered = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    except Exception:  # a template is third-party code, and most are for texts
        return IMAGE
    pieces = str(rendered).split(seed)
    return pieces[1] if len(pieces) == 3 and re.search("image|img", pieces[1], re.IGNORECASE) else IMAGE
