"""The seam between an environment and whatever finds passages for it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from spear_envs.core.errors import SpearError
from spear_envs.core.faults import EnvFault

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.retriever import Retriever

__all__ = ["FaultKind", "LocalSearcher", "RetrieverFault", "Searcher", "check_match"]


class FaultKind(str, Enum):
    """How a retriever can fail its caller."""

    UNAVAILABLE = "retriever_unavailable"
    """Nobody answers, or only that the service cannot serve now."""
    TIMEOUT = "retriever_timeout"
    """No answer within the deadline."""
    BAD_REPLY = "retriever_bad_reply"
    """An answer that is not of the contract."""


class RetrieverFault(EnvFault):
    """A retriever failed, and not the one who asked; ``kind`` is a value of :class:`FaultKind`."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(kind.value, message)

    def __reduce__(self) -> tuple[type[RetrieverFault], tuple[FaultKind, str]]:
        return type(self), (FaultKind(self.kind), self.message)


class Searcher(Protocol):
    """Finds documents for one query at a time."""

    @property
    def fingerprint(self) -> str:
        """Identifies corpus and retriever: equal fingerprints give equal results."""

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """Documents, best first, at most ``topk``; each has at least ``id`` and ``contents``.

        Raises:
            RetrieverFault: the retriever failed.
            SpearError: the request is not valid.
        """


class LocalSearcher:
    """Searches in this process.

    Args:
        corpus: the documents.
        retriever: finds rows of this very corpus.

    Raises:
        SpearError: corpus and retriever do not belong together.
    """

    def __init__(self, corpus: Corpus, retriever: Retriever) -> None:
        check_match(corpus, retriever)
        self._corpus = corpus
        self._retriever = retriever

    @property
    def fingerprint(self) -> str:
        """The retriever's."""
        return self._retriever.fingerprint

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """See :class:`Searcher`."""
        (hits,) = self._retriever.search([query], topk)
        return [self._corpus.document(row) for row, _ in hits]


def check_match(corpus: Corpus, retriever: Retriever) -> None:
    """Refuse a retriever whose rows cannot be those of the corpus: its hits would be other passages.

    Raises:
        SpearError: they differ in length.
    """
    if retriever.rows != len(corpus):
        raise SpearError(
            f"the index has {retriever.rows:,} passages and the corpus {len(corpus):,}: give the corpus that the "
            "index was built from, or build the index anew with 'spear index build'."
        )
