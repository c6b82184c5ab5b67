"""The calls of one program as token sequences: calls that continue one another share a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear_agents.calling import CallForm, find_form, spell_out
from spear_agents.chat import Chat, Message
from spear_agents.engines.base import ContextExceededError, Finish
from spear_envs.core.errors import SpearError


@dataclass(frozen=True)
class Asked:
    """A prompt of a program: its text and ids for the engine, of which earlier calls of the row lack ``new_ids``.

    It continues the response to the call with index ``follows``, or starts a row. The row's first prompt has
    ``opening`` tokens; ``room`` are those left for the response, None without a limit.
    """

    text: str
    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    follows: int | None
    opening: int
    room: int | None


@dataclass(frozen=True)
class _Said:
    """An answered call."""

    text: str
    """Of prompt and response."""
    ids: tuple[int, ...]
    finish: Finish
    opening: int


class Transcript:
    """Every prompt of a program and every response to it.

    A prompt continues an earlier call if the chat template, given the program's messages, reproduces that call's prompt
    and response exactly. Then its sampled tokens are kept and only the rest is tokenised. If a template drops earlier
    thoughts, or the program rewrites its history, the texts differ and the prompt starts a new row: a model is trained
    on what it would read when served. ``max_row_tokens`` bounds a row after its first prompt (less for later rows,
    whose prompts are longer), and ``max_prompt_tokens`` then the first prompt only.
    """

    def __init__(self, chat: Chat, max_prompt_tokens: int | None = None, max_row_tokens: int | None = None) -> None:
        self._chat = chat
        self._max_prompt_tokens = max_prompt_tokens
        self._max_row_tokens = max_row_tokens
        source = str(getattr(chat.tokenizer, "chat_template", "") or "")
        self._knows_tools = "tools" in source and chat.takes_tools
        self.form: CallForm = find_form(source if self._knows_tools else "")
        """The model's format of calls."""
        self._said: list[_Said] = []
        self._free: set[int] = set()
        """Indices of calls that no other continues."""

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, goes_on: bool = False
    ) -> Asked:
        """Build the prompt of ``messages``; :meth:`add` or :meth:`leave` must follow.

        Messages and the JSON schemas of tools are in OpenAI's form, with contents as text and arguments of calls as
        objects. Their texts are disarmed (:meth:`~spear_agents.chat.Chat.disarm_all`). ``goes_on``: the last message is
        the beginning of the response. Raises ContextExceededError if it is too long, SpearError if the chat template
        refuses the messages.

        The same in steps, of which the first and the third are heavy and may run in a thread: :meth:`render`,
        :meth:`begin`, ``encode`` of the chat, :meth:`finish`.
        """
        text = self.render(messages, tools, goes_on)
        follows, rest = self.begin(text)
        return self.finish(text, follows, self._chat.encode(rest))

    def begin(self, text: str) -> tuple[int | None, str]:
        """Take the earlier call that a prompt continues, if any; return it and the text that is to be tokenised."""
        follows = self._find_begin(text)
        if follows is None:
            return None, text
        self._free.discard(follows)
        said = self._said[follows]
        rest = text[len(said.text) :]
        return follows, self._chat.drop_end(rest) if said.finish is Finish.STOP else rest

    def finish(self, text: str, follows: int | None, new_ids: tuple[int, ...]) -> Asked:
        """Make the prompt. Raises ContextExceededError if it is too long; the call that it continues is free again."""
        said = None if follows is None else self._said[follows]
        ids = new_ids if said is None else said.ids + new_ids
        opening = len(ids) if said is None else said.opening
        try:
            return Asked(text, ids, new_ids, follows, opening, self._measure_room(len(ids), opening))
        except ContextExceededError:
            self.release(follows)
            raise

    def release(self, follows: int | None) -> None:
        """Let another prompt continue a call that one has given up."""
        if follows is not None:
            self._free.add(follows)

    def check_length(self, characters: int) -> None:
        """Raise ContextExceededError for messages that have too many characters for any tokenisation."""
        longest = self._chat.longest_token
        if longest is None or self._max_prompt_tokens is None:
            return
        most = (self._max_prompt_tokens + (self._max_row_tokens or 0)) * longest
        if characters > most:
            raise ContextExceededError(f"the messages have {characters} characters, and {most} are too many tokens")

    def add(self, asked: Asked, token_ids: tuple[int, ...], finish: Finish) -> str:
        """Add the response to ``asked``; return its text."""
        response = self._chat.decode(token_ids)
        self._free.add(len(self._said))
        self._said.append(_Said(asked.text + response, asked.ids + token_ids, finish, asked.opening))
        return response

    def leave(self, asked: Asked) -> None:
        """Drop ``asked``, which got no response."""
        self.release(asked.follows)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], goes_on: bool) -> str:
        """The text of a prompt, disarmed. Raises SpearError if the chat template refuses the messages."""
        messages, tools = self._chat.disarm_all(messages), self._chat.disarm_all(tools)
        keywords: dict[str, Any] = {"continue_final_message": True} if goes_on else {}
        if not self._knows_tools:
            system = "system" if self._chat.takes_system else "user"
            plain = spell_out(messages, tools, system=system)
            return self._chat.render(plain, add_generation_prompt=not goes_on, **keywords)
        if tools and self.form is CallForm.UNKNOWN:
            raise SpearError("the chat template of this model has tool calls of an unknown form: send no tools")
        if tools:
            keywords["tools"] = list(tools)
        return self._chat.render(messages, add_generation_prompt=not goes_on, **keywords)

    def _find_begin(self, text: str) -> int | None:
        """The longest open call that ``text`` continues."""
        fitting = []
        for place in self._free:
            said = self._said[place]
            rest = text[len(said.text) :]
            if text.startswith(said.text) and (said.finish is not Finish.STOP or self._chat.starts_with_end(rest)):
                fitting.append((len(said.text), place))
        return max(fitting)[1] if fitting else None

    def _measure_room(self, length: int, opening: int) -> int | None:
        """Tokens left for the response.

        The first prompt of an episode has at most ``max_prompt_tokens``. One that starts a later row contains earlier
        rows, so its limit is that of prompt and row together.
        """
        limited = self._max_row_tokens is not None
        checked = opening if limited else length
        longest = self._max_prompt_tokens
        if longest is not None and checked > longest and not (limited and self._said):
            raise ContextExceededError(f"the prompt has {checked} tokens of at most {longest}")
        if self._max_row_tokens is None:
            return None
        most = (opening if longest is None else min(opening, longest)) + self._max_row_tokens
        if length >= most:
            raise ContextExceededError(f"the conversation has {length} tokens, and {most} have no room for a response")
        return most - length
