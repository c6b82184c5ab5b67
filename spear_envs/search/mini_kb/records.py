"""A knowledge base and its questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spear_envs.search.mini_kb.sizes import BaseSize


@dataclass(frozen=True)
class Question:
    """A question with its answers and the passages that lead to them."""

    id: str
    """``<split>/<number>``, such as ``test/00017``."""
    question: str
    golden_answers: list[str]
    """The answer's name, then its aliases."""
    hops: int
    """Passages that must be read one after the other: 1, 2 or 3."""
    gold_passages: list[str]
    """Ids of these passages, in order; the last one contains a golden answer."""
    oracle_queries: list[str]
    """A query that finds each passage, made of words of the question and the earlier passages."""


@dataclass(frozen=True)
class KnowledgeBase:
    """A corpus and questions about it. Do not change it: callers of ``build`` share it."""

    size: BaseSize
    seed: int
    corpus: list[dict[str, str]]
    """``{"id": "17", "contents": '"Title"\\ntext'}``; the id is the row."""
    questions: Mapping[str, list[Question]]
    """By split: ``train``, ``valid``, ``test``. One, two and three hops alternate, so any beginning is balanced."""
