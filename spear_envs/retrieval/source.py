"""What a service serves: a corpus, and a retriever over it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.opening import open_retriever
from spear_envs.retrieval.retriever import Retriever

__all__ = ["open_source"]

# The knowledge base of an environment; named, since this folder knows none, and imported only when it is served.
EMBEDDED_BASE = EntryPoint("mini", "spear_envs.search.mini_kb:build", "spear.corpora")


def open_source(corpus: Path | None, kind: str, index: Path | None) -> tuple[Corpus, Retriever]:
    """Open both.

    Args:
        corpus: a file of JSON lines; None for the embedded knowledge base.
        kind: of the retriever, as for :func:`~spear_envs.retrieval.opening.open_retriever`.
        index: folder that ``spear index build`` wrote.

    Raises:
        SpearError: one of them cannot be opened, or they do not belong together.
    """
    found = Corpus.in_memory(EMBEDDED_BASE.load()().corpus) if corpus is None else Corpus.open(corpus)
    return found, open_retriever(kind, found, index)
