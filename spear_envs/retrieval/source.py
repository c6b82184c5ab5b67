"""What a service serves: a corpus, and a retriever over it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.opening import open_retriever
from spear_envs.retrieval.retriever import Retriever

__all__ = ["Source"]

# The knowledge base of an environment; named, since this folder knows none, and imported only when it is served.
EMBEDDED_BASE = EntryPoint("mini", "spear_envs.search.mini_kb:build", "spear.corpora")


@dataclass(frozen=True)
class Source:
    """Names what is served; each process that serves it opens it for itself."""

    corpus: Path | None = None
    """A file of JSON lines; None for the embedded knowledge base."""
    kind: str = "bm25"
    """Of the retriever; this and the following as for :func:`~spear_envs.retrieval.opening.open_retriever`."""
    index: Path | None = None
    encoder: str | None = None
    ef_search: int | None = None
    nprobe: int | None = None
    threads: int = 1
    device: str = "cpu"

    def open(self) -> tuple[Corpus, Retriever]:
        """The corpus and the retriever.

        Raises:
            SpearError: one of them cannot be opened, or they do not belong together.
        """
        corpus = Corpus.open(self.corpus) if self.corpus else Corpus.in_memory(EMBEDDED_BASE.load()().corpus)
        retriever = open_retriever(
            self.kind,
            corpus,
            self.index,
            encoder=self.encoder,
            ef_search=self.ef_search,
            nprobe=self.nprobe,
            threads=self.threads,
            device=self.device,
        )
        return corpus, retriever
