"""Stop strings: texts at which a response ends, such as a closing tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_SPARE = 4
"""Tokens examined beyond the length of a stop string, since some tokens have no text."""
_CHARACTER = 4
"""Maximum bytes of a character. If a window begins within one, some tokenizers drop the characters after it."""


class Decoder(Protocol):
    """The decoding half of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of token ids."""
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
        """Whether ``token_ids`` reach a stop string with their last token, and not before."""
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
