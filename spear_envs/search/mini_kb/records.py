"""What a knowledge base consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spear_envs.search.mini_kb.sizes import BaseSize


@dataclass(frozen=True)
class Question:
    """A question with what is needed to grade an answer, and to find it."""

    id: str
    """``<split>/<number>``, such as ``test/00017``."""
    question: str
    golden_answers: list[str]
    """The answer's name, then its aliases."""
    hops: int
    """Passages that have to be read one after the other: 1, 2 or 3."""
    gold_passages: list[str]
    """Ids of these passages, in order; the last one holds a golden answer."""
    oracle_queries: list[str]
    """For each passage a query that finds it, made of words of the question and of the passages before."""


@dataclass(frozen=True)
class KnowledgeBase:
    """A corpus and questions about it. Shared by all who build the same one: not to be changed."""

    size: BaseSize
    seed: int
    corpus: list[dict[str, str]]
    """``{"id": "17", "contents": '"Title"\\ntext'}``; the id is the row."""
    questions: Mapping[str, list[Question]]
    """By split: ``train``, ``valid``, ``test``. One, two and three hops take turns: any beginning is balanced."""
