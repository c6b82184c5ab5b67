"""Grading short answers: exact match normalised as in SQuAD, and token F1 as in HotpotQA."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

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


def exact_match(prediction: str | None, golds: str | Sequence[str]) -> float:
    """Return 1.0 if the prediction equals a gold answer, else 0.0.

    Both sides are normalised first. Where a side normalises to nothing (``The The``), the two must be equal after
    stripping and lower-casing instead, and a blank prediction earns nothing.
    """
    if prediction is None:
        return 0.0
    normal = normalize_answer(prediction)
    return float(any(_is_same(prediction, normal, gold, normalize_answer(gold)) for gold in _list_golds(golds)))


def f1_score(prediction: str | None, golds: str | Sequence[str]) -> float:
    """Return the F1 of normalised tokens (multisets) with the best gold answer, in [0, 1].

    ``yes``, ``no`` and ``noanswer`` on either side must match exactly (HotpotQA's evaluation script). Where a side
    normalises to nothing, the score is that of :func:`exact_match`.
    """
    if prediction is None:
        return 0.0
    normal = normalize_answer(prediction)
    return max((_score_one(prediction, normal, gold) for gold in _list_golds(golds)), default=0.0)


def _list_golds(golds: str | Sequence[str]) -> Sequence[str]:
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
