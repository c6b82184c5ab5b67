"""The embedded knowledge base: invented people, places and works, passages about them, and questions of 1 to 3 hops.

``scripts/datasets`` in the repository made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from spear_envs.core.errors import choose_member
from spear_envs.data.embedded import read_embedded

SPLITS = ("train", "valid", "test")


class BaseSize(str, Enum):
    """The size of an embedded knowledge base."""

    STANDARD = "standard"
    """Invented names, aliases, namesakes and distractors, several phrasings: for language models."""
    SMALL = "small"
    """Some hundred different words, one phrasing, few misleading passages: for tiny word-level policies."""


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
    """A corpus and questions about it. Do not change it: callers of :func:`open_base` share it."""

    corpus: list[dict[str, str]]
    """``{"id": "17", "contents": '"Title"\\ntext'}``; the id is the row."""
    questions: Mapping[str, list[Question]]
    """By split: ``train``, ``valid``, ``test``. One, two and three hops alternate, so any beginning is balanced."""


def open_base(size: BaseSize | str = BaseSize.STANDARD) -> KnowledgeBase:
    """Return an embedded knowledge base; all callers share one.

    Raises:
        SpearError: the size is neither ``"standard"`` nor ``"small"``.
    """
    return _read_base(choose_member(BaseSize, size, "size"))


@lru_cache(maxsize=2)
def _read_base(size: BaseSize) -> KnowledgeBase:
    data = read_embedded("search")[size.value]
    questions = {split: [Question(**asked) for asked in data["questions"][split]] for split in SPLITS}
    return KnowledgeBase([{"id": str(row), "contents": text} for row, text in enumerate(data["corpus"])], questions)
