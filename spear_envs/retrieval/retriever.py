"""The protocol for finding passages, which indexes in this process, engines and services follow."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import EnvFault, SpearError

if TYPE_CHECKING:
    from spear_envs.retrieval.corpus import Corpus

TOKEN_VARIABLE = "SPEAR_RETRIEVER_TOKEN"
"""Environment variable with the bearer token, for the service and its clients."""
DEFAULT_TOPK, MAX_TOPK = 3, 100
MAX_CHARACTERS = 8192
"""The longest query that the service takes."""


class FaultKind(str, Enum):
    """How a retriever can fail its caller."""

    UNAVAILABLE = "retriever_unavailable"
    """No answer, or an answer that the service cannot serve now."""
    TIMEOUT = "retriever_timeout"
    """No answer within the deadline."""
    BAD_REPLY = "retriever_bad_reply"
    """An answer that breaks the contract."""


class RetrieverFault(EnvFault):
    """A failure of the retriever, not of the policy; ``kind`` is a value of :class:`FaultKind`."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(kind.value, message)

    def __reduce__(self) -> tuple[type[RetrieverFault], tuple[FaultKind, str]]:
        return type(self), (FaultKind(self.kind), self.message)


class RetrieverRefusal(SpearError):
    """A refusal that asking again does not change, such as a wrong key or a spent budget."""


class Passage:
    """A document that was found, and its score.

    The document of a corpus is read when ``raw`` is, since most passages found are never sent.
    """

    __slots__ = ("_row", "_source", "score")

    def __init__(self, source: Corpus | bytes, score: float, row: int = -1) -> None:
        self._source = source
        self._row = row
        self.score = score

    @property
    def raw(self) -> bytes:
        """Return the document as a JSON object in UTF-8, with ``id`` and ``contents``."""
        return self._source if isinstance(self._source, bytes) else self._source.raw(self._row)

    @property
    def held_bytes(self) -> int:
        """Estimate the memory of this object in bytes."""
        return 120 + (len(self._source) if isinstance(self._source, bytes) else 0)


@dataclass(frozen=True)
class Load:
    """What a retriever takes at once."""

    calls: int = 1
    """Concurrent calls of ``search``, each on its own thread."""
    queries: int = 256
    """Queries of one call."""
    on_loop: bool = False
    """Whether a call is faster than passing it to a thread, and does not use OpenMP."""


class Retriever(ABC):
    """Finds passages. ``load`` limits what callers may ask for at once."""

    fingerprint: str
    """Fingerprint; equal for retrievers with the same results, as far as that is known."""
    passages: int | None = None
    """Number of documents; None if unknown."""
    load: Load = Load()

    @abstractmethod
    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Passage]]:
        """Find at most ``k`` passages for each query, best first.

        Raises:
            RetrieverFault: it failed; another try may succeed.
            RetrieverRefusal: it refuses, and another try is useless.
            SpearError: the request is not valid.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return kind and settings as plain data, for people and ``/health``, without secrets."""

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the cost of each query in a batch, which costs the number of its queries times its greatest length."""
        return [1] * len(queries)

    def counts(self) -> Mapping[str, float]:
        """Return counts since it was opened, by name: ``requests`` and ``cost``."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close files and connections, if it has some of its own."""


def find_documents(retriever: Retriever, query: str, k: int) -> list[dict[str, Any]]:
    """Find at most ``k`` documents for one query, best first, parsed."""
    (found,) = retriever.search([query], k)
    return [json.loads(passage.raw) for passage in found]
