"""Choosing the drafts that become questions: those that need their searches and can be answered by them.

Searching takes most of the time of making a base. For the bases of the published seeds, ``dropped.json`` therefore has
the verdicts; ``scripts/judge_questions.py`` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from importlib import resources
from itertools import count

from spear_envs.bm25.index import SearchIndex
from spear_envs.search.mini_kb.questions import Draft, Judge
from spear_envs.search.mini_kb.sizes import BaseSize

RECORD = "dropped.json"
TOPK = 3
"""Passages of a search; the environment's default."""
WALKED = 2
"""Rank that a query must bring its passage to; one less than ``TOPK`` leaves room for other rankings."""


class SearchingJudge:
    """Keeps a draft on three conditions: each query finds its passage; neither the question nor a passage before the
    last names the answer; and a search with the question itself finds the passage of a single hop, but for more hops
    no passage that names the answer.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self._texts = [text.lower() for text in contents]
        self._find = SearchIndex.in_memory(contents).search

    def __call__(self, draft: Draft) -> bool:
        """Return whether the draft is kept."""
        answers = [answer.lower() for answer in draft.answer.answers]

        def names_answer(text: str) -> bool:
            return any(answer in text for answer in answers)

        *earlier, last = (entity.row for entity in draft.path)
        if names_answer(draft.text.lower()) or any(names_answer(self._texts[row]) for row in earlier):
            return False
        steps = zip([*earlier, last], draft.queries, strict=True)
        if any(row not in self._find(query, WALKED) for row, query in steps):
            return False
        found = self._find(draft.text, TOPK)
        return last in found if not earlier else not any(names_answer(self._texts[row]) for row in found)


class _RememberingJudge:
    """Repeats recorded verdicts; drafts come in a fixed order."""

    def __init__(self, dropped: Collection[int]) -> None:
        self._dropped = frozenset(dropped)
        self._numbers = count()

    def __call__(self, draft: Draft) -> bool:
        return next(self._numbers) not in self._dropped


def choose_judge(contents: Sequence[str], size: BaseSize) -> Judge:
    """Return the recorded verdicts if they are of this corpus, else a judge that searches."""
    record = json.loads(resources.files(__package__).joinpath(RECORD).read_text("utf-8")).get(size.value)
    if record is not None and record["corpus"] == digest_corpus(contents):
        return _RememberingJudge(record["dropped"])
    return SearchingJudge(contents)


def digest_corpus(contents: Sequence[str]) -> str:
    """Return the SHA-256 (hex) of the passages."""
    return hashlib.sha256("\0".join(contents).encode()).hexdigest()
