"""Grading conversations that were not played here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from spear_envs.core.errors import SpearError, choose_member
from spear_envs.search.grading import exact_match, f1_score, normalize_answer
from spear_envs.search.grammar import read_content, take_out

_OPENED = re.compile("<(search|answer)>")


class AnswerRule(str, Enum):
    """What counts as the answer of a conversation, and as the same as a gold answer."""

    ENVIRONMENT = "environment"
    """As the environment does: :func:`find_answer` and :func:`~spear_envs.search.grading.exact_match`."""
    SEARCH_R1 = "search_r1"
    """As Search-R1's ``qa_em`` does: :func:`find_last_answer`, equal after normalising. Only to compare with its
    figures: prompt and passages count as said by the policy."""


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
    for written in _read_messages(messages, "assistant"):
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


def find_last_answer(messages: Sequence[Mapping[str, str]]) -> str | None:
    """The answer that Search-R1's ``qa_em`` finds in a conversation: the last one of the whole text, whoever wrote it.

    A single pair of tags is taken for the example in the prompt, and gives None, as none does. But the prompt has two
    (``<answer> and </answer>``, ``<answer> Beijing </answer>``): so a policy that never answers is held to have said
    Beijing, or "and" where Search-R1's sentence on invalid actions came last.

    Args:
        messages: each with ``role`` and ``content``, in order, the prompt among them.

    Raises:
        SpearError: a message is of another form.
    """
    whole = "\n".join(_read_messages(messages))
    found = []
    position = 0
    while (opening := whole.find("<answer>", position)) >= 0:
        closing = whole.find("</answer>", opening)
        if closing < 0:
            break
        found.append(whole[opening + len("<answer>") : closing].strip())
        position = closing + len("</answer>")
    return found[-1] if len(found) > 1 else None


def _read_messages(messages: Sequence[Mapping[str, str]], role: str | None = None) -> Iterator[str]:
    """The text of each message, or of those of one role."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or "role" not in message:
            raise SpearError(f'message {number} is not a chat message: give {{"role": "assistant", "content": "…"}}.')
        if role not in (None, message["role"]):
            continue
        written = message.get("content")
        if not isinstance(written, str):
            raise SpearError(f"message {number} has no text under 'content': join the texts of its parts.")
        yield written


def grade_transcript(
    messages: Sequence[Mapping[str, str]], golds: str | Sequence[str], rule: str = "environment"
) -> dict[str, float]:
    """``exact_match`` and ``f1`` of a conversation's answer, both in [0, 1].

    Args:
        messages: each with ``role`` and ``content``, in order.
        golds: one gold answer or several.
        rule: value of :class:`AnswerRule`.

    Raises:
        SpearError: a message is of another form, or there is no such rule.
    """
    if choose_member(AnswerRule, rule, "rule") is AnswerRule.ENVIRONMENT:
        answer = find_answer(messages)
        return {"exact_match": exact_match(answer, golds), "f1": f1_score(answer, golds)}
    answer = find_last_answer(messages)
    listed = [golds] if isinstance(golds, str) else golds
    same = answer is not None and normalize_answer(answer) in map(normalize_answer, listed)
    return {"exact_match": float(same), "f1": f1_score(answer, golds)}
