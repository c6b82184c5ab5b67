"""Choosing the drafts that become questions: those that need their searches and can be answered by them."""

from __future__ import annotations

from collections.abc import Sequence

from base.questions import Draft
from spear_envs.bm25.index import SearchIndex

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
