"""The interface of everything that finds passages: our indexes, engines, other services, the web."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spear_envs.core.errors import SpearError

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.retriever import Retriever


FEW_PASSAGES = 20_000
"""BM25 over this many takes a tenth of a millisecond per query."""
Passage = int | bytes
"""A row of a mapped corpus, or the document as a JSON object in UTF-8."""
Found = tuple[Passage, float]
"""A passage and its score."""


@dataclass(frozen=True)
class Load:
    """What a backend takes at once."""

    calls: int = 1
    """Concurrent calls of ``search``, each on its own thread."""
    queries: int = 256
    """Queries of one call."""
    on_loop: bool = False
    """Whether a call is faster than passing it to a thread, and does not use OpenMP."""


class Backend(Protocol):
    """Finds passages. ``load`` limits what one call may ask for."""

    @property
    def fingerprint(self) -> str:
        """Equal for backends with the same results, as far as that is known."""

    @property
    def passages(self) -> int | None:
        """Number of documents; None if unknown."""

    @property
    def scale(self) -> str | None:
        """Scale of scores, which are comparable if equal; None for mere ranks."""

    @property
    def load(self) -> Load:
        """What it takes at once."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """Find at most ``k`` passages for each query, best first.

        Raises:
            RetrieverFault: it failed; another try may succeed.
            RetrieverRefusal: it refuses, and another try is useless.
        """

    def read(self, passage: Passage) -> bytes:
        """Read the document of a passage as a JSON object with ``id`` and ``contents``."""

    def describe(self) -> dict[str, Any]:
        """Kind and settings as plain data, for people and ``/health``, without secrets."""

    def counts(self) -> Mapping[str, float]:
        """Counts since it was opened, by name: ``requests``, ``cost`` and the like."""

    def close(self) -> None:
        """Close files and connections."""


class DocumentBackend:
    """Base of backends whose passages are documents, which cost the same whatever their length."""

    passages: int | None = None

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return 1 for each query."""
        return [1] * len(queries)

    def read(self, passage: Passage) -> bytes:
        """Return the passage, which is the document."""
        assert isinstance(passage, bytes)
        return passage

    def counts(self) -> Mapping[str, float]:
        """Return no counts."""
        return {}

    def close(self) -> None:
        """Do nothing: connections belong to the process."""


class EmbeddedBackend:
    """A corpus, and a retriever of its rows, in this process.

    Raises:
        SpearError: they do not match.
    """

    def __init__(self, corpus: Corpus, retriever: Retriever) -> None:
        if retriever.rows != len(corpus):
            raise SpearError(
                f"the index has {retriever.rows:,} passages and the corpus {len(corpus):,}: give the corpus that the "
                "index was built from, or build the index again with 'spear index build'."
            )
        self._corpus = corpus
        self._retriever = retriever
        self.fingerprint = retriever.fingerprint
        self.passages: int | None = len(corpus)
        self.scale: str | None = str(retriever.describe()["kind"])
        few = self.scale == "bm25" and len(corpus) <= FEW_PASSAGES
        self.load = Load(queries=16, on_loop=True) if few else Load()
        # The bound methods, since a query of the embedded base takes under a tenth of a millisecond.
        self.lengths = retriever.lengths
        self.search = retriever.search

    def read(self, passage: Passage) -> bytes:
        """The line of the row."""
        assert isinstance(passage, int)
        return self._corpus.raw(passage)

    def describe(self) -> dict[str, Any]:
        """Describe the retriever and the corpus."""
        return {**self._retriever.describe(), "corpus": self._corpus.fingerprint}

    def counts(self) -> Mapping[str, float]:
        """Nothing: the service counts queries."""
        return {}

    def close(self) -> None:
        """Do nothing: mappings end with their last user."""
