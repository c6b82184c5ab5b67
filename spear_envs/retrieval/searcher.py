"""The seam between an environment and whatever finds passages for it."""

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


class RetrieverRefusal(SpearError):
    """A retriever will not answer, however often it is asked: a wrong key, a spent budget, a search not recorded."""


class Searcher(Protocol):
    """Finds documents for one query at a time."""

    @property
    def fingerprint(self) -> str:
        """Identifies corpus and retriever: equal fingerprints give equal results."""

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """Documents, best first, at most ``topk``; each has at least ``id`` and ``contents``.

        Raises:
            RetrieverFault: the retriever failed.
            RetrieverRefusal: it will not answer.
            SpearError: the request is not valid.
        """


class LocalSearcher:
    """Asks a backend from this process.

    Args:
        backend: asked by the threads that ask the searcher.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def fingerprint(self) -> str:
        """The backend's."""
        return self._backend.fingerprint

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """See :class:`Searcher`."""
        (hits,) = self._backend.search([query], topk)
        return [json.loads(self._backend.read(passage)) for passage, _ in hits]
