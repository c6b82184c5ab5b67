"""The seam of everything that finds passages: an index of ours, an engine, another service, the web."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spear_envs.core.errors import SpearError

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus
    from spear_envs.retrieval.retriever import Retriever


FEW_PASSAGES = 20_000
"""BM25 over so many takes a tenth of a millisecond for a query."""
Passage = int | bytes
"""A row of a mapped corpus, read when it is sent, or the document itself as one JSON object in UTF-8."""
Found = tuple[Passage, float]
"""A passage and its score."""


@dataclass(frozen=True)
class Load:
    """What a backend takes at a time."""

    calls: int = 1
    """Calls of ``search`` side by side, each on a thread of its own."""
    queries: int = 256
    """Queries of one call."""
    on_loop: bool = False
    """A call takes less time than handing it to a thread, and sets no threads of OpenMP."""


class Backend(Protocol):
    """Finds passages. ``load`` limits what one call may ask for."""

    @property
    def fingerprint(self) -> str:
        """Equal for backends that give the same results, as far as they can be told apart."""

    @property
    def passages(self) -> int | None:
        """Number of documents; None where nobody knows it."""

    @property
    def scale(self) -> str | None:
        """What scores are, so that those of one scale can be compared; None where they are ranks only."""

    @property
    def load(self) -> Load:
        """What it takes at a time."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """As of :class:`~spear_envs.retrieval.retriever.Retriever`."""

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """At most ``k`` passages for each query, in order, best first.

        Raises:
            RetrieverFault: it failed; another try may succeed.
            RetrieverRefusal: it will not answer, however often it is asked.
        """

    def read(self, passage: Passage) -> bytes:
        """The document of a passage that ``search`` gave, as one JSON object with ``id`` and ``contents``."""

    def describe(self) -> dict[str, Any]:
        """Kind and settings as plain data, for people and ``/health``; nothing secret."""

    def counts(self) -> Mapping[str, float]:
        """What it counted since it was opened, by name: ``requests``, ``cost`` and the like."""

    def close(self) -> None:
        """Let go of files and connections."""


class EmbeddedBackend:
    """A corpus, and a retriever of its rows, in this process.

    Args:
        corpus: the documents.
        retriever: finds rows of this very corpus.

    Raises:
        SpearError: they do not belong together.
    """

    def __init__(self, corpus: Corpus, retriever: Retriever) -> None:
        check_match(corpus, retriever)
        self._corpus = corpus
        self._retriever = retriever
        self.fingerprint = retriever.fingerprint
        self.passages: int | None = len(corpus)
        self.scale: str | None = str(retriever.describe()["kind"])
        few = self.scale == "bm25" and len(corpus) <= FEW_PASSAGES
        self.load = Load(queries=16, on_loop=True) if few else Load()
        # The methods themselves: a query of the embedded base takes less than a tenth of a millisecond.
        self.lengths = retriever.lengths
        self.search = retriever.search

    def read(self, passage: Passage) -> bytes:
        """The line of the row."""
        assert isinstance(passage, int)
        return self._corpus.raw(passage)

    def describe(self) -> dict[str, Any]:
        """Those of the retriever, and the corpus."""
        return {**self._retriever.describe(), "corpus": self._corpus.fingerprint}

    def counts(self) -> Mapping[str, float]:
        """Nothing: the service counts queries."""
        return {}

    def close(self) -> None:
        """Nothing: what is mapped goes with its last user."""


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


def read_as_is(passage: Passage) -> bytes:
    """The document, of a backend whose passages are documents."""
    assert isinstance(passage, bytes)
    return passage


def add_counts(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counts of several backends together."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def summarize(backends: Mapping[str, Backend]) -> str:
    """What a service has, for people: ``"72 passages, bm25"``, and with names where there are several."""

    def tell(backend: Backend) -> str:
        kind = str(backend.describe()["kind"])
        return kind if backend.passages is None else f"{backend.passages:,} passages, {kind}"

    if len(backends) == 1:
        return tell(next(iter(backends.values())))
    return "; ".join(f"{name}: {tell(backend)}" for name, backend in backends.items())
