"""Another retrieval service as a backend: ours, Search-R1's, or one that speaks alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from spear_envs.retrieval.backend import Found, Load, read_as_is
from spear_envs.retrieval.backends.asking import Asker, Call, digest_plain, read_json
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault, RetrieverRefusal
from spear_envs.retrieval.wire import TOKEN_VARIABLE, BadReplyError, read_result, write_request
from spear_sandbox.web.listening import read_token

__all__ = ["ServiceBackend"]

BATCH = 16


class ServiceBackend:
    """Servers of one service, asked in turn.

    Args:
        urls: base addresses.
        token_variable: of the environment, with the bearer token, if the service wants one.
        calls: requests side by side.
        deadline_s, tries: of :class:`~spear_envs.retrieval.backends.asking.Asker`.
    """

    passages: int | None = None
    scale: str | None = "service"
    read = staticmethod(read_as_is)

    def __init__(
        self, urls: Sequence[str], *, token_variable: str | None, calls: int, deadline_s: float, tries: int
    ) -> None:
        self.load = Load(calls, BATCH)
        variable = token_variable or TOKEN_VARIABLE

        def make_headers() -> Mapping[str, str]:
            token = read_token(variable)
            return {"Authorization": f"Bearer {token}"} if token else {}

        self._asker = Asker(
            urls, deadline_s=deadline_s, tries=tries, headers=make_headers, key=f"the variable {variable}"
        )

    @cached_property
    def fingerprint(self) -> str:
        """What the service says in ``/health``; of its addresses, if it says nothing. Asked once."""
        try:
            (response,) = self._asker.gather([self._asker.ask(Call("GET", "/health"))])
            said = read_json(response).get("fingerprint")
        except RetrieverRefusal:  # Search-R1's own servers have no such page
            said = None
        except RetrieverFault as error:
            if error.kind != FaultKind.BAD_REPLY.value:
                raise
            said = None
        return said if isinstance(said, str) else digest_plain(sorted(self._asker.urls))

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """1 for each query."""
        return [1] * len(queries)

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """See :class:`~spear_envs.retrieval.backend.Backend`. Without scores in the answer they are 1/rank."""
        return self._asker.gather([self._search(queries, k)])[0]

    async def _search(self, queries: Sequence[str], k: int) -> list[list[Found]]:
        response = await self._asker.ask(Call("POST", "/retrieve", write_request(queries, k)))
        try:
            rows = read_result(response.content, len(queries), k)
        except BadReplyError as error:
            raise RetrieverFault(FaultKind.BAD_REPLY, f"{response.url}: {error}.") from None
        return [
            [
                (json.dumps(document).encode(), 1 / rank if score is None else score)
                for rank, (document, score) in enumerate(row, start=1)
            ]
            for row in rows
        ]

    def describe(self) -> dict[str, Any]:
        """Kind and addresses."""
        return {"kind": "service", "urls": list(self._asker.urls)}

    def counts(self) -> Mapping[str, float]:
        """Requests."""
        return {"requests": self._asker.budget.requests}

    def close(self) -> None:
        """Nothing: connections are the process's."""
