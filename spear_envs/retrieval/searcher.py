"""The interface between an environment and the retriever that finds its passages."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from spear_envs.core.errors import SpearError
from spear_envs.core.faults import EnvFault

if TYPE_CHECKING:
    from spear_envs.retrieval.backend import Backend


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
    """A refusal that asking again does not change: a wrong key, a spent budget, a search not recorded."""


class Searcher(Protocol):
    """Finds documents for one query at a time."""

    @property
    def fingerprint(self) -> str:
        """Identify corpus and retriever: equal fingerprints give equal results."""

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """Find at most ``topk`` documents, best first; each has at least ``id`` and ``contents``.

        Raises:
            RetrieverFault: the retriever failed.
            RetrieverRefusal: asking again will not help.
            SpearError: the request is not valid.
        """


class LocalSearcher:
    """Asks a backend in this process, on the thread of the caller."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def fingerprint(self) -> str:
        """Return the backend's."""
        return self._backend.fingerprint

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """See :class:`Searcher`."""
        (hits,) = self._backend.search([query], topk)
        return [json.loads(self._backend.read(passage)) for passage, _ in hits]
