"""The indexes of a service as its options name them: a corpus and a retriever over it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Protocol

from spear_envs.retrieval.backend import Backend, EmbeddedBackend
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.opening import open_retriever

DEFAULT = "default"
"""Name of an index that was not given one."""

# The knowledge base of an environment: by name, since this package imports none, and loaded only when it is served.
EMBEDDED_BASE = EntryPoint("mini", "spear_envs.search.embedded:open_base", "spear.corpora")


class AnySource(Protocol):
    """Names the indexes of a service; each of its processes opens them for itself."""

    def open(self) -> dict[str, Backend]:
        """Open the indexes: by name, the default first.

        Raises:
            SpearError: one of them cannot be opened.
        """


@dataclass(frozen=True)
class Source:
    """A corpus and a retriever over it."""

    corpus: Path | None = None
    """A JSON Lines file; None for the embedded knowledge base."""
    kind: str = "bm25"
    """Kind of the retriever; this and the following as in :func:`~spear_envs.retrieval.opening.open_retriever`."""
    index: Path | None = None
    encoder: str | None = None
    ef_search: int | None = None
    nprobe: int | None = None
    threads: int = 1
    device: str = "cpu"

    def open(self) -> dict[str, Backend]:
        """Open the one index.

        Raises:
            SpearError: corpus or index cannot be opened, or do not belong together.
        """
        return {DEFAULT: self.open_index()}

    def open_index(self) -> EmbeddedBackend:
        """See :meth:`open`."""
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
        return EmbeddedBackend(corpus, retriever)
