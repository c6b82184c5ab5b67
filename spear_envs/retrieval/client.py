"""Asking a retrieval service, from gymnasium's ``step`` or from any event loop."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault
from spear_envs.retrieval.session import HttpSession, share_session
from spear_envs.retrieval.wire import EXPECTED_REPLY, TOKEN_VARIABLE, BadReplyError, read_result, write_request
from spear_sandbox.web.endpoints import Backoff, Endpoint, EndpointRing, Service, read_urls
from spear_sandbox.web.listening import read_token
from spear_sandbox.web.replies import read_detail, read_retry_after

if TYPE_CHECKING:
    import httpx

__all__ = ["RetrieverClient"]

CONNECT_S = 5.0
REFUSALS = frozenset({400, 403, 413, 422})
PASSING = frozenset({429, 502, 503})
SERVICE = Service("a retrieval service", "/retrieve", 8000, TOKEN_VARIABLE)
PLAIN_QUERY = "Paris"
"""What a server is asked that failed at its first search."""


@dataclass(frozen=True)
class _Call:
    """One HTTP request, to whichever server has its turn."""

    method: str
    path: str
    body: bytes | None = None


class RetrieverClient:
    """A :class:`~spear_envs.retrieval.searcher.Searcher` over HTTP: our service, Search-R1's, or one that speaks alike.

    All clients of a process share one pool of connections. A client may be used from any thread and any event loop,
    may be pickled, and works on in a forked child. Proxies of the environment are not used.

    Servers are asked in turn; one that fails is left out for a while. A request is tried again after connection errors
    and the statuses 429, 502 and 503, for as long as ``Retry-After`` says where it is given.

    A server whose first answer is not of the contract will never give one that is, so that ends the run; once it has
    answered rightly, a bad answer is a fault of this one search.

    Args:
        urls: base addresses of one service, such as ``"http://127.0.0.1:8000"``.
        token: bearer token; by default the variable ``SPEAR_RETRIEVER_TOKEN`` of the environment.
        deadline_s: seconds for all tries of a request together.
        tries: how often a request is sent at most.
        backoff: how long a server that fails is left out.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        deadline_s: float = 30.0,
        tries: int = 8,
        backoff: Backoff | None = None,
    ) -> None:
        self.urls = read_urls(urls, SERVICE)
        if deadline_s <= 0 or tries < 1:
            raise SpearError(f"deadline_s={deadline_s} and tries={tries}: give more than 0 seconds and at least 1 try.")
        self.deadline_s = deadline_s
        self.tries = tries
        self.backoff = backoff or Backoff()
        self._token = token
        self._proved: set[str] = set()
        self._fingerprint: str | None = None
        self._ring: EndpointRing | None = None
        self._ring_pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ring": None, "_ring_pid": 0}

    @property
    def fingerprint(self) -> str:
        """What the service says of itself in ``/health``; its addresses, if it says nothing. Asked once.

        Raises:
            RetrieverFault: nobody answers.
            SpearError: the servers have different indexes.
        """
        if self._fingerprint is None:
            session = share_session()
            self._fingerprint = _finish(session.submit(self._identify(session)))
        return self._fingerprint

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """Documents for one query, best first, at most ``topk``. Blocks the calling thread only.

        Raises:
            RetrieverFault: nobody answered in time, or a server that has answered rightly before did not.
            SpearError: the service refused the request itself, wants another token, or does not speak the contract.
        """
        session = share_session()
        (documents,) = _finish(session.submit(self._search(session, [query], topk)))
        return documents

    async def search_async(self, queries: Sequence[str], topk: int) -> list[list[dict[str, Any]]]:
        """Documents for each query, in order, without blocking; of any event loop.

        Raises:
            RetrieverFault, SpearError: as :meth:`search`.
        """
        session = share_session()
        return await asyncio.wrap_future(session.submit(self._search(session, queries, topk)))

    async def _search(self, session: HttpSession, queries: Sequence[str], topk: int) -> list[list[dict[str, Any]]]:
        response = await self._ask(session, _Call("POST", SERVICE.path, write_request(queries, topk)))
        server = str(response.url)
        try:
            if response.status_code != 200:
                raise BadReplyError(f"the answer has the status {response.status_code} ({read_detail(response)})")
            found = read_result(response.content, len(queries), topk)
        except BadReplyError as error:
            if server in self._proved:
                raise RetrieverFault(FaultKind.BAD_REPLY, f"{server}: {error}.") from None
            raise SpearError(
                f"{server} is not a retrieval service as Search-R1 has it: {error}. Expected is {EXPECTED_REPLY}: give"
                " the address of another service, or put one before it that answers so."
            ) from None
        self._proved.add(server)
        return [[document for document, _ in row] for row in found]

    async def _identify(self, session: HttpSession) -> str:
        """The one fingerprint of all servers that answer."""
        first = await self._ask(session, _Call("GET", "/health"))
        call = _Call("GET", "/health")
        others = [self._send(session, call, url, self.deadline_s) for url in self.urls if len(self.urls) > 1]
        answers = [first, *(await asyncio.gather(*others, return_exceptions=True))]
        found = {_read_fingerprint(answer) for answer in answers if not isinstance(answer, BaseException)} - {None}
        if len(found) > 1:
            raise SpearError(
                f"the servers {', '.join(self.urls)} do not have the same index: start them over one corpus and index."
            )
        return next(iter(found), None) or f"unidentified:{','.join(self.urls)}"

    async def _ask(self, session: HttpSession, call: _Call) -> httpx.Response:
        """The first answer that is not a passing failure.

        Raises:
            RetrieverFault: there was none in time, or the service failed.
            SpearError: the request was refused.
        """
        import httpx

        loop = asyncio.get_running_loop()
        ring = self._find_ring()
        end = loop.time() + self.deadline_s
        failure = ""
        for attempt in range(1, self.tries + 1):
            endpoint = ring.choose(loop.time())
            wait = endpoint.free_from - loop.time()
            if wait > 0:
                wait += ring.choose_delay()
                left = end - loop.time()
                if failure and wait >= left:
                    break
                await asyncio.sleep(min(wait, left / 2))  # a server that failed others is tried once at least
            try:
                response = await self._send(session, call, endpoint.url, end - loop.time())
            except asyncio.TimeoutError:
                ring.note_failure(endpoint, loop.time())
                raise RetrieverFault(
                    FaultKind.TIMEOUT, f"no answer from {endpoint.url} within {self.deadline_s:g} s, at try {attempt}."
                ) from None
            except httpx.TransportError as error:
                failure = f"{endpoint.url} cannot be reached ({type(error).__name__}: {error})"
                ring.note_failure(endpoint, loop.time())
                continue
            if response.status_code not in PASSING:
                if response.status_code >= 500 and response.status_code != 504:
                    await self._require_working(session, response, end - loop.time())
                self._judge(response, ring, endpoint)
                return response
            failure = f"{endpoint.url} answered {response.status_code}: {read_detail(response)}"
            ring.note_failure(endpoint, loop.time(), read_retry_after(response.headers))
        raise RetrieverFault(FaultKind.UNAVAILABLE, f"{failure}; last of {attempt} tries.")

    async def _require_working(self, session: HttpSession, response: httpx.Response, seconds: float) -> None:
        """Refuse a server that failed before any right answer, and fails on a plain query as well.

        Raises:
            SpearError: it would do so for ever.
        """
        import httpx

        server = str(response.url)
        base = server.removesuffix(SERVICE.path)
        if base == server or server in self._proved:
            return
        call = _Call("POST", SERVICE.path, write_request([PLAIN_QUERY], 1))
        for _ in range(3):  # a server that fails may close the connection, too
            try:
                probe = await self._send(session, call, base, seconds)
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            except asyncio.TimeoutError:
                return
            if probe.status_code != response.status_code:
                return
            raise SpearError(
                f"{server} answered {probe.status_code} ({read_detail(probe)}) to the first search and to a plain one,"
                f" {PLAIN_QUERY!r}: its own log says why. Mend it, then start again."
            )

    async def _send(self, session: HttpSession, call: _Call, url: str, seconds: float) -> httpx.Response:
        import httpx

        headers = {"Content-Type": "application/json"} if call.body is not None else {}
        token = self._token or read_token(TOKEN_VARIABLE)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        request = session.client.request(
            call.method,
            url + call.path,
            content=call.body,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
        return await asyncio.wait_for(request, max(seconds, 0.001))

    def _judge(self, response: httpx.Response, ring: EndpointRing, endpoint: Endpoint) -> None:
        """Raise what an answer means that no further try would change."""
        status = response.status_code
        now = asyncio.get_running_loop().time()
        if status == 401:
            raise SpearError(
                f"{endpoint.url} wants another bearer token (status {status}): set {TOKEN_VARIABLE} to the service's."
            )
        if status in REFUSALS:
            raise SpearError(
                f"{endpoint.url} refused the request (status {status}: {read_detail(response)}). A search sends"
                ' {"queries": ["…"], "topk": 3, "return_scores": true} in a POST to /retrieve.'
            )
        if status == 504:
            ring.note_failure(endpoint, now)
            raise RetrieverFault(FaultKind.TIMEOUT, f"{endpoint.url} answered 504: {read_detail(response)}")
        if status >= 500:
            ring.note_failure(endpoint, now)
            raise RetrieverFault(FaultKind.UNAVAILABLE, f"{endpoint.url} answered {status}: {read_detail(response)}")
        ring.note_success(endpoint)

    def _find_ring(self) -> EndpointRing:
        """The servers as this process sees them; forked children draw jitter of their own."""
        if self._ring is None or self._ring_pid != os.getpid():
            self._ring = EndpointRing(self.urls, self.backoff, random.Random())
            self._ring_pid = os.getpid()
        return self._ring


def _finish(future: Any) -> Any:
    """The future's result; whoever stops waiting for it, by Ctrl-C say, cancels it."""
    try:
        return future.result()
    finally:
        future.cancel()


def _read_fingerprint(response: httpx.Response) -> str | None:
    try:
        fingerprint = json.loads(response.content)["fingerprint"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None
