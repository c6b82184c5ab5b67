"""A tokenizer for policies that have none: every UTF-8 byte is a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_END = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a response.  Any text comes back from its tokens, lone surrogates included."""

    eos_token_id: int | None = _END

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> str:
        """The contents one after the other, with an end mark's place left to the tokens."""
        return "".join(message["content"] for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of bytes; the end token has none, and bytes that are no text are replaced."""
        data = bytes(i for i in token_ids if i < _END)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")
