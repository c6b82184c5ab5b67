"""Grading conversations that were not played here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from spear_envs.core.errors import SpearError
from spear_envs.search.grading import exact_match, f1_score
from spear_envs.search.grammar import read_content, take_out

__all__ = ["find_answer", "grade_transcript"]

_OPENED = re.compile("<(search|answer)>")


def find_answer(messages: Sequence[Mapping[str, str]]) -> str | None:
    """The answer that ended a conversation: the first one that the assistant gave; None if it gave none.

    Only messages of the assistant are read, so neither an example in the prompt nor a passage in another message
    counts. Thoughts, and what stands between information tags within a message (as in Search-R1's transcripts, which
    have passages there), are taken out first.

    Args:
        messages: each with ``role`` and ``content``, in order.

    Raises:
        SpearError: a message is of another form.
    """
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or "role" not in message:
            raise SpearError(f'message {number} is none: give {{"role": "assistant", "content": "…"}}.')
        if message["role"] != "assistant":
            continue
        written = message.get("content")
        if not isinstance(written, str):
            raise SpearError(f"message {number} has no text under 'content': join the texts of its parts.")
        rest, _ = take_out(written, "think", preopened=True)
        rest, _ = take_out(rest, "information", preopened=False)
        position = 0
        for opened in _OPENED.finditer(rest):
            if opened.start() < position:
                continue
            end = f"</{opened[1]}>"
            closing = rest.find(end, opened.end())
            if closing < 0:
                break
            content = read_content(rest[opened.end() : closing])
            if opened[1] == "answer" and content:
                return content
            position = closing + len(end)
    return None


def grade_transcript(messages: Sequence[Mapping[str, str]], golds: str | Sequence[str]) -> dict[str, float]:
    """``exact_match`` and ``f1`` of the answer that :func:`find_answer` finds."""
    answer = find_answer(messages)
    return {"exact_match": exact_match(answer, golds), "f1": f1_score(answer, golds)}
