"""Which drafts become questions: those that need the searches they are made for, and can be answered by them.

Searching takes most of the time of making a base. For the bases that everybody uses, ``dropped.json`` therefore holds
what the searches found; ``scripts/judge_questions.py`` writes it.
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
"""How far up a query must bring its passage: one place less than ``TOPK`` leaves room for other rankings."""


class SearchingJudge:
    """Keeps a draft if each of its queries finds the passage it is for, if its answer is named neither in the question
    nor in a passage before the last, and if a search with the question itself is enough for one hop and brings no name
    of the answer for more.

    Args:
        contents: the corpus.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self._texts = [text.lower() for text in contents]
        self._find = SearchIndex.in_memory(contents).search

    def __call__(self, draft: Draft) -> bool:
        """Whether the draft is kept."""
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


class RecordingJudge:
    """Says what another judge says, and keeps the numbers of the drafts that it dropped."""

    def __init__(self, judge: Judge) -> None:
        self.dropped: list[int] = []
        self._judge = judge
        self._numbers = count()

    def __call__(self, draft: Draft) -> bool:
        """Whether the draft is kept."""
        number, kept = next(self._numbers), self._judge(draft)
        if not kept:
            self.dropped.append(number)
        return kept


class _RememberingJudge:
    """Repeats what a recording judge heard; drafts come in one order."""

    def __init__(self, dropped: Collection[int]) -> None:
        self._dropped = frozenset(dropped)
        self._numbers = count()

    def __call__(self, draft: Draft) -> bool:
        return next(self._numbers) not in self._dropped


def choose_judge(contents: Sequence[str], size: BaseSize) -> Judge:
    """The record, if it is of this corpus, or else searches."""
    record = json.loads(resources.files(__package__).joinpath(RECORD).read_text("utf-8")).get(size.value)
    if record is not None and record["corpus"] == digest_corpus(contents):
        return _RememberingJudge(record["dropped"])
    return SearchingJudge(contents)


def digest_corpus(contents: Sequence[str]) -> str:
    """SHA-256 (hex) of the passages."""
    return hashlib.sha256("\0".join(contents).encode()).hexdigest()
