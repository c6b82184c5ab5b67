"""Another retrieval service as a backend: ours, Search-R1's, or a compatible one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spear_envs.retrieval.backend import Found, Load, read_as_is
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.wire import TOKEN_VARIABLE

BATCH = 16


class ServiceBackend:
    """Servers of one service, asked in turn by a :class:`~spear_envs.retrieval.client.RetrieverClient`.

    Args:
        urls: base addresses.
        token_variable: environment variable with the bearer token, if the service needs one.
        calls: concurrent requests.
        deadline_s, tries: of the client.
    """

    passages: int | None = None
    scale: str | None = "service"
    read = staticmethod(read_as_is)

    def __init__(
        self, urls: Sequence[str], *, token_variable: str | None, calls: int, deadline_s: float, tries: int
    ) -> None:
        self.load = Load(calls, BATCH)
        self._client = RetrieverClient(
            urls, token_variable=token_variable or TOKEN_VARIABLE, deadline_s=deadline_s, tries=tries
        )

    @property
    def fingerprint(self) -> str:
        """The service's fingerprint, or one of its addresses."""
        return self._client.fingerprint

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return 1 for each query."""
        return [1] * len(queries)

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

    def close(self) -> None:
        """Do nothing: connections belong to the process."""
