"""The client of a retrieval service, for gymnasium's ``step`` or any event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import Asker, Call, describe_answer
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault, RetrieverRefusal
from spear_envs.retrieval.session import share_session
from spear_envs.retrieval.wire import EXPECTED_REPLY, TOKEN_VARIABLE, BadReplyError, read_result, write_request
from spear_sandbox.web.endpoints import Backoff, Service, read_urls
from spear_sandbox.web.listening import read_token
from spear_sandbox.web.replies import read_detail

if TYPE_CHECKING:
    import httpx


REFUSALS = frozenset({400, 403, 413, 422})
PASSING = frozenset({429, 502, 503})
"""Not 500, which may be due to the query, and not 504, which has used up the time."""
SERVICE = Service("a retrieval service", "/retrieve", 8000, TOKEN_VARIABLE)
HEALTH = Call("GET", "/health")
PLAIN_QUERY = "Paris"
"""Asked of a server that failed at its first search."""


class RetrieverClient:
    """A :class:`~spear_envs.retrieval.searcher.Searcher` over HTTP: our service, Search-R1's, or a compatible one.

    All clients of a process share one pool of connections. A client may be used from any thread, event loop and forked
    child, and may be pickled. :class:`~spear_envs.retrieval.asking.Asker` takes the servers in turn.

    A server whose first answer is invalid will never give a valid one, so that ends the run; after a valid answer an
    invalid one is a fault of that search.

    Args:
        urls: base addresses of one service, such as ``"http://127.0.0.1:8000"``.
        token: bearer token; by default that of ``token_variable``.
        token_variable: environment variable of the token.
        deadline_s: seconds for all tries of a request together.
        tries: how often a request is sent at most.
        backoff: how long a failing server is left out.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        token_variable: str = TOKEN_VARIABLE,
        deadline_s: float = 30.0,
        tries: int = 8,
        backoff: Backoff | None = None,
    ) -> None:
        self.urls = read_urls(urls, SERVICE)
        if deadline_s <= 0 or tries < 1:
            raise SpearError(f"deadline_s={deadline_s} and tries={tries}: give more than 0 seconds and at least 1 try.")
        self._token = token
        self._token_variable = token_variable
        self._deadline_s = deadline_s
        self._proved: set[str] = set()
        self._asker = Asker(
            self.urls,
            deadline_s=deadline_s,
            tries=tries,
            passing=PASSING,
            backoff=backoff,
            headers=self._make_headers,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint from ``/health``, else one of the addresses; asked once.

        Raises:
            RetrieverFault: there is no answer.
            SpearError: the servers have different indexes.
        """
        return self._asker.run(self._identify())

    @property
    def requests(self) -> int:
        """Number of requests sent by this process."""
        return self._asker.budget.requests

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """Documents for one query, best first, at most ``topk``. Blocks the calling thread only.

        Raises:
            RetrieverFault: there was no answer in time, or no valid one from a server that gave one before.
            RetrieverRefusal: the service refused the request or the token, or is not a retrieval service.
        """
        (row,) = self.find([query], topk)
        return [document for document, _ in row]

    def find(self, queries: Sequence[str], topk: int) -> list[list[tuple[dict[str, Any], float | None]]]:
        """Documents for each query with their scores, None if the server omits them. Blocks the calling thread only.

        Raises:
            RetrieverFault, RetrieverRefusal: as :meth:`search`.
        """
        return self._asker.run(self._find(queries, topk))

    async def search_async(self, queries: Sequence[str], topk: int) -> list[list[dict[str, Any]]]:
        """Documents for each query, in order, without blocking; of any event loop.

        Raises:
            RetrieverFault, RetrieverRefusal: as :meth:`search`.
        """
        found = await asyncio.wrap_future(share_session().submit(self._find(queries, topk)))
        return [[document for document, _ in row] for row in found]

    async def _find(self, queries: Sequence[str], topk: int) -> list[list[tuple[dict[str, Any], float | None]]]:
        response = await self._asker.ask(Call("POST", SERVICE.path, write_request(queries, topk)))
        await self._judge(response)
        server = str(response.url)
        try:
            if response.status_code != 200:
                raise BadReplyError(f"the answer has the status {response.status_code} ({read_detail(response)})")
            found = read_result(response.content, len(queries), topk)
        except BadReplyError as error:
            if server in self._proved:
                raise RetrieverFault(FaultKind.BAD_REPLY, f"{server}: {error}.") from None
            raise RetrieverRefusal(
                f"{server} does not answer like Search-R1's retrieval service: {error}. Expected is {EXPECTED_REPLY}:"
                " give the address of another service, or put an adapter before it."
            ) from None
        self._proved.add(server)
        return found

    async def _identify(self) -> str:
        """Find the common fingerprint of all servers that answer."""
        first = await self._asker.ask(HEALTH)
        await self._judge(first)
        others = [self._asker.send(HEALTH, url, self._deadline_s) for url in self.urls if len(self.urls) > 1]
        answers = [first, *(await asyncio.gather(*others, return_exceptions=True))]
        found = {_read_fingerprint(answer) for answer in answers if not isinstance(answer, BaseException)} - {None}
        if len(found) > 1:
            raise SpearError(
                f"the servers {', '.join(self.urls)} do not have the same index: start them with one corpus and index."
            )
        return next(iter(found), None) or f"unidentified:{','.join(self.urls)}"

    async def _judge(self, response: httpx.Response) -> None:
        """Raise for answers for which retries are useless."""
        status = response.status_code
        if status == 401:
            raise RetrieverRefusal(
                f"{describe_answer(response)}: it wants another bearer token; set {self._token_variable} to the"
                " service's."
            )
        if status in REFUSALS:
            raise RetrieverRefusal(
                f"{describe_answer(response)}: it refused the request. A search sends"
                ' {"queries": ["…"], "topk": 3, "return_scores": true} in a POST to /retrieve.'
            )
        if status == 504:
            raise RetrieverFault(FaultKind.TIMEOUT, describe_answer(response))
        if status >= 500:
            await self._require_working(response)
            raise RetrieverFault(FaultKind.UNAVAILABLE, describe_answer(response))

    async def _require_working(self, response: httpx.Response) -> None:
        """Refuse a server that failed before any valid answer, and also fails on a plain query.

        Raises:
            RetrieverRefusal: it does.
        """
        import httpx

        server = str(response.url)
        base = server.removesuffix(SERVICE.path)
        if base == server or server in self._proved:
            return
        call = Call("POST", SERVICE.path, write_request([PLAIN_QUERY], 1))
        for _ in range(3):  # a server that fails may close the connection, too
            try:
                probe = await self._asker.send(call, base, self._deadline_s)
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
                continue
            except asyncio.TimeoutError:
                return
            if probe.status_code != response.status_code:
                return
            raise RetrieverRefusal(
                f"{describe_answer(probe)}, to the first search and to a plain one, {PLAIN_QUERY!r}: see its log."
                " Fix it, then start again."
            )

    def _make_headers(self) -> Mapping[str, str]:
        token = self._token or read_token(self._token_variable)
        return {"Authorization": f"Bearer {token}"} if token else {}


def _read_fingerprint(response: httpx.Response) -> str | None:
    try:
        fingerprint = json.loads(response.content)["fingerprint"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None
