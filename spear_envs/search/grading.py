"""Grading short answers: exact match normalised as in SQuAD, and token F1 as in HotpotQA."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.parsing import cut_native_thought, split_elements
from spear_envs.search.grammar import read_content, take_out

Golds: TypeAlias = "str | Sequence[str] | Mapping[str, str | Sequence[str]]"
"""One gold answer, several, or these under ``target``, as in Search-R1's files."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Return the form in which answers are compared.

    Lower case; the 32 characters of ASCII punctuation deleted; the words *a*, *an*, *the* replaced by a blank; white
    space collapsed. The order is that of SQuAD's evaluation script: ``twenty-one`` becomes ``twentyone``.
    Letters are not decomposed or composed, and curly quotes stay.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Golds) -> float:
    """Return 1.0 if the prediction equals a gold answer, else 0.0.

    Both sides are normalised first. Where a side normalises to nothing (``The The``), the two must be equal after
    stripping and lower-casing instead, and a blank prediction earns nothing.
    """
    if prediction is None:
        return 0.0
    normal = normalize_answer(prediction)
    return float(any(_is_same(prediction, normal, gold, normalize_answer(gold)) for gold in _list_golds(golds)))


def f1_score(prediction: str | None, golds: Golds) -> float:
    """Return the F1 of normalised tokens (multisets) with the best gold answer, in [0, 1].

    ``yes``, ``no`` and ``noanswer`` on either side must match exactly (HotpotQA's evaluation script). Where a side
    normalises to nothing, the score is that of :func:`exact_match`.
    """
    if prediction is None:
        return 0.0
    normal = normalize_answer(prediction)
    return max((_score_one(prediction, normal, gold) for gold in _list_golds(golds)), default=0.0)


def _list_golds(golds: Golds) -> Sequence[str]:
    golds = golds["target"] if isinstance(golds, Mapping) else golds
    return [golds] if isinstance(golds, str) else golds


def _is_same(prediction: str, normal: str, gold: str, normal_gold: str) -> bool:
    if normal and normal_gold:
        return normal == normal_gold
    written = prediction.strip().lower()
    return bool(written) and written == gold.strip().lower()


def _score_one(prediction: str, normal: str, gold: str) -> float:
    normal_gold = normalize_answer(gold)
    if not normal or not normal_gold or normal == normal_gold:
        return float(_is_same(prediction, normal, gold, normal_gold))
    if normal in _VERDICTS or normal_gold in _VERDICTS:
        return 0.0
    given, wanted = normal.split(), normal_gold.split()
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted))


_OPENED = re.compile("<(search|answer)>")


class AnswerRule(str, Enum):
    """The rule that finds the answer of a conversation and compares it with a gold answer."""

    ENVIRONMENT = "environment"
    """As in the environment: :func:`find_answer` and :func:`~spear_envs.search.grading.exact_match`."""
    SEARCH_R1 = "search_r1"
    """As in Search-R1's ``qa_em``: :func:`find_last_answer`, equal after normalising. Only to compare with its figures:
    it searches prompt and passages, too."""


def find_answer(messages: Sequence[Mapping[str, str]]) -> str | None:
    """Find the answer that ended a conversation: the first one of the assistant, or None.

    Only messages of the assistant are read, so neither an example in the prompt nor a passage in another message
    counts. Thoughts are taken out first. Within a message, information tags (where Search-R1's transcripts have the
    passages) separate the responses; as in the environment, only the first element of a response is played.

    Args:
        messages: each with ``role`` and ``content``, in order.

    Raises:
        SpearError: a message has another form.
    """
    for written in _read_messages(messages, "assistant"):
        rest, _ = take_out(cut_native_thought(written)[1], "think")
        for response in split_elements(rest, "information")[0]:
            if (answer := _find_played(response)) is not None:
                return answer
    return None


def _find_played(response: str) -> str | None:
    """Return the answer of a response, or None if it searches before, or has none."""
    position = 0
    for opened in _OPENED.finditer(response):
        if opened.start() < position:
            continue
        end = f"</{opened[1]}>"
        closing = response.find(end, opened.end())
        if closing < 0:
            break
        if content := read_content(response[opened.end() : closing]):
            return content if opened[1] == "answer" else None
        position = closing + len(end)
    return None


def find_last_answer(messages: Sequence[Mapping[str, str]]) -> str | None:
    """Find the answer as Search-R1's ``qa_em`` does: the last one of the conversation, from any role.

    Fewer than two pairs of tags give None: a single one is taken for the example in the prompt. But the prompt has two
    (``<answer> and </answer>``, ``<answer> Beijing </answer>``): a policy that never answers gets Beijing, or "and" if
    Search-R1's sentence on invalid actions came last.

    Args:
        messages: each with ``role`` and ``content``, in order, the prompt among them.

    Raises:
        SpearError: a message has another form.
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
    """Yield the text of each message, or of those of one role."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or "role" not in message:
            raise SpearError(f'message {number} is not a chat message: give {{"role": "assistant", "content": "…"}}.')
        if role not in (None, message["role"]):
            continue
        written = message.get("content")
        if not isinstance(written, str):
            raise SpearError(f"message {number} lacks a text under 'content': join the texts of its parts.")
        yield written


def grade_transcript(
    messages: Sequence[Mapping[str, str]], golds: Golds, rule: str = "environment"
) -> dict[str, float]:
    """Grade the answer of a conversation: ``exact_match`` and ``f1``, both in [0, 1].

    Args:
        messages: each with ``role`` and ``content``, in order.
        golds: one gold answer or several, or Search-R1's ``ground_truth``, which has them under ``target``.
        rule: value of :class:`AnswerRule`.

    Raises:
        SpearError: a message has another form, or the rule is unknown.
    """
    if choose_member(AnswerRule, rule, "rule") is AnswerRule.ENVIRONMENT:
        answer = find_answer(messages)
        return {"exact_match": exact_match(answer, golds), "f1": f1_score(answer, golds)}
    answer = find_last_answer(messages)
    same = answer is not None and normalize_answer(answer) in map(normalize_answer, _list_golds(golds))
    return {"exact_match": float(same), "f1": f1_score(answer, golds)}
