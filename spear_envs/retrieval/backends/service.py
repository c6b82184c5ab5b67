"""Another retrieval service as a backend: ours, Search-R1's, or a compatible one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spear_envs.retrieval.backend import DocumentBackend, Found, Load
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.wire import TOKEN_VARIABLE
from spear_sandbox.web.endpoints import Service as Addresses
from spear_sandbox.web.endpoints import read_urls

if TYPE_CHECKING:
    from spear_envs.retrieval.backends.settings import Service


BATCH = 16


class ServiceBackend(DocumentBackend):
    """Servers of one service, asked in turn by a :class:`~spear_envs.retrieval.client.RetrieverClient`."""

    scale: str | None = "service"

    def __init__(self, settings: Service) -> None:
        self.load = Load(settings.concurrency, BATCH)
        variable = settings.token_variable or TOKEN_VARIABLE
        self._client = RetrieverClient(
            read_urls(settings.urls, Addresses("a retrieval service", "/retrieve", 8000, variable)),
            token_variable=variable,
            deadline_s=settings.deadline_s,
            tries=settings.tries,
        )

    @property
    def fingerprint(self) -> str:
        """The service's fingerprint, or one of its addresses."""
        return self._client.fingerprint

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """See :class:`~spear_envs.retrieval.backend.Backend`. Without scores in the answer they are 1/rank."""
        return [
            [
                (json.dumps(document).encode(), 1 / rank if score is None else score)
                for rank, (document, score) in enumerate(row, start=1)
            ]
            for row in self._client.find(queries, k)
        ]

    def describe(self) -> dict[str, Any]:
        """Kind and addresses."""
        return {"kind": "service", "urls": list(self._client.urls)}

    def counts(self) -> Mapping[str, float]:
        """Requests."""
        return {"requests": self._client.requests}
