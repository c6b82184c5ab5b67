"""A tokenizer for policies that have none: every UTF-8 byte is a token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
        """The bytes of ``text``."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of bytes, without the end token; invalid bytes are replaced."""
        data = bytes(i for i in token_ids if i < BYTES_END)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


class ChatByteTokenizer(ByteTokenizer):
    """Bytes with a mark for each role, so that messages can be recovered from a prompt's ids.

    Ids 257 to 259 begin a message of the system, the user and the assistant. Marks within an observation are broken
    up by :class:`~spear_agents.prompting.PromptBuilder`, as those of any tokenizer.
    """

    all_special_tokens: tuple[str, ...] = tuple(_MARK.format(role) for role in _ROLES)

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> str:
        """Put each message after the mark of its role, and the assistant's mark at the end to continue."""
        text = "".join(_MARK.format(message["role"]) + message["content"] for message in conversation)
        return text + _MARK.format("assistant") if kwargs.get("add_generation_prompt") else text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The bytes of ``text`` and the ids of its marks."""
        ids: list[int] = []
        end = 0
        for mark in _MARKS.finditer(text):
            ids += super().encode(text[end : mark.start()])
            ids.append(BYTES_END + 1 + _ROLES.index(mark[0][1:-1]))
            end = mark.end()
        return ids + super().encode(text[end:])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids, without marks of roles if ``skip_special_tokens``."""
        text: list[str] = []
        for role, content in self._split(token_ids):
            text += [_MARK.format(role)] if role and not skip_special_tokens else []
            text.append(content)
        return "".join(text)

    def encode_plain(self, text: str) -> list[int]:
        """The bytes of ``text`` without recognising marks, for text of a model."""
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
        """Role and content of each message; the role is empty before the first mark."""
        parts: list[tuple[str, list[int]]] = [("", [])]
        for token in token_ids:
            if BYTES_END < token <= BYTES_END + len(_ROLES):
                parts.append((_ROLES[token - BYTES_END - 1], []))
            else:
                parts[-1][1].append(token)
        return [(role, super(ChatByteTokenizer, self).decode(ids)) for role, ids in parts if role or ids]
