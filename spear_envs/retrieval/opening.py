"""Opening a retriever by the name of its kind."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from spear_envs.core.errors import SpearError, choose_member
from spear_envs.retrieval.bm25 import BM25Retriever
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.manifest import Part
from spear_envs.retrieval.retriever import Retriever


class RetrieverKind(Enum):
    """How passages are found."""

    BM25 = "bm25"
    """By their words. Needs no extra and no model."""
    DENSE = "dense"
    """By the vectors of a sentence encoder. Needs the extra ``search`` and an index."""
    HYBRID = "hybrid"
    """By both, fused by reciprocal rank."""


def open_retriever(
    kind: str | RetrieverKind,
    corpus: Corpus,
    index: Path | None = None,
    *,
    encoder: str | Path | None = None,
    ef_search: int | None = None,
    nprobe: int | None = None,
    threads: int = 1,
    device: str = "cpu",
) -> Retriever:
    """Open the retriever of a corpus.

    Args:
        index: folder that ``spear index build`` wrote. BM25 over at most 100,000 documents needs none.
        encoder, ef_search, nprobe, threads, device: of :class:`~spear_envs.retrieval.dense.DenseRetriever`.

    Raises:
        SpearError: the kind is unknown; or the index is missing, damaged, or of another corpus or model.
        ModuleNotFoundError: a dense retriever without the extra ``search``.
    """
    kind = choose_member(RetrieverKind, kind, "retriever")
    if kind is RetrieverKind.BM25:
        given = {
            "encoder": encoder is not None,
            "ef_search": ef_search is not None,
            "nprobe": nprobe is not None,
            "threads": threads != 1,
            "device": device != "cpu",
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise SpearError(f"BM25 does not use {' and '.join(names)}: leave them out.")
        return BM25Retriever(corpus, index)
    if index is None:
        raise SpearError(
            f"retriever={kind.value!r} needs an index: make one with 'spear index build' and give its folder."
        )
    from spear_envs.retrieval.dense import DenseRetriever

    dense = DenseRetriever(
        corpus, index, encoder=encoder, ef_search=ef_search, nprobe=nprobe, threads=threads, device=device
    )
    if kind is RetrieverKind.DENSE:
        return dense
    from spear_envs.retrieval.hybrid import HybridRetriever

    has_words = (Path(index) / Part.BM25.value).is_dir()
    return HybridRetriever([BM25Retriever(corpus, index if has_words else None), dense])
