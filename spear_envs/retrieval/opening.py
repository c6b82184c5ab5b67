"""Opening a retriever by the name of its kind."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from spear_envs.core.errors import SpearError, choose_member
from spear_envs.retrieval.bm25 import BM25Retriever
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.retriever import Retriever

__all__ = ["RetrieverKind", "open_retriever"]


class RetrieverKind(Enum):
    """How passages are found."""

    BM25 = "bm25"
    """By their words. Needs no extra and no model."""
    DENSE = "dense"
    """By the vectors of a sentence encoder. Needs the extra ``search`` and an index."""
    HYBRID = "hybrid"
    """By both, fused by reciprocal rank."""


def open_retriever(kind: str | RetrieverKind, corpus: Corpus, index: Path | None = None) -> Retriever:
    """Open the retriever of a corpus.

    Args:
        kind: ``"bm25"``, ``"dense"`` or ``"hybrid"``.
        corpus: what is searched.
        index: folder that ``spear index build`` wrote. BM25 over at most 100,000 documents needs none.

    Raises:
        SpearError: no such kind; the index is missing, damaged, or of another corpus or model.
    """
    kind = choose_member(RetrieverKind, kind, "retriever")
    if kind is RetrieverKind.BM25:
        return BM25Retriever(corpus, index)
    raise SpearError("dense and hybrid are being built")
