"""The client of a retrieval service, for gymnasium's ``step`` or any event loop."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import Asker, Call, describe_answer, share_session
from spear_envs.retrieval.retriever import (
    TOKEN_VARIABLE,
    FaultKind,
    Load,
    Passage,
    Retriever,
    RetrieverFault,
    RetrieverRefusal,
)
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
QUERIES = 16
"""Queries of one request, where a service asks another."""
PLAIN_QUERY = "Paris"
"""Asked of a server that failed at its first search."""
EXPECTED_REPLY = '{"result": [[{"document": {"contents": "…"}, "score": 1.0}, …], …]}'
"""An answer, as errors show it."""
SHOWN_OF_REPLY = 120
ID_DIGITS = 32
"""Hex digits of SHA-256 in the id of a document that came without one."""


class BadReplyError(Exception):
    """The body is not a valid answer; the message says why."""


class RetrieverClient(Retriever):
    """A retriever over HTTP: our service, Search-R1's, or a compatible one.

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
        concurrency: requests at a time, where a service asks this one.
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
        concurrency: int = 8,
    ) -> None:
        self.urls = read_urls(urls, SERVICE)
        if deadline_s <= 0 or tries < 1:
            raise SpearError(f"deadline_s={deadline_s} and tries={tries}: give more than 0 seconds and at least 1 try.")
        self.load = Load(concurrency, QUERIES)
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
    def fingerprint(self) -> str:  # type: ignore[override]
        """Return the fingerprint from ``/health``, else one of the addresses; asked once.

        Raises:
            RetrieverFault: there is no answer.
            SpearError: the servers have different indexes.
        """
        return self._asker.run(self._identify())

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Find passages, blocking the calling thread only. Without scores in the answer they are 1/rank.

        Raises:
            RetrieverFault: there was no answer in time, or no valid one from a server that gave one before.
            RetrieverRefusal: the service refused the request or the token, or is not a retrieval service.
        """
        return self._asker.run(self._find(queries, k))

    async def search_async(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Do the same without blocking, on any event loop."""
        return await asyncio.wrap_future(share_session().submit(self._find(queries, k)))

    def describe(self) -> dict[str, Any]:
        """Return kind and addresses."""
        return {"kind": "service", "urls": list(self.urls)}

    def counts(self) -> Mapping[str, float]:
        """Return the number of requests sent by this process."""
        return {"requests": self._asker.budget.requests}

    async def _find(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        response = await self._asker.ask(Call("POST", SERVICE.path, write_request(queries, k)))
        await self._judge(response)
        server = str(response.url)
        try:
            if response.status_code != 200:
                raise BadReplyError(f"the answer has the status {response.status_code} ({read_detail(response)})")
            found = read_result(response.content, len(queries), k)
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


def write_request(queries: Sequence[str], topk: int) -> bytes:
    """Write the body of a request.

    Ask for scores, since Search-R1's own server answers single queries only with them.
    """
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def read_result(body: bytes, queries: int, topk: int) -> list[list[Passage]]:
    """Read the passages of each query, in any form that Search-R1's servers write.

    An item is a document, or ``{"document": …}`` with or without a score; a document is an object with ``contents``, or
    the text alone. A document without an ``id`` gets the digest of its text. Rows longer than ``topk`` are cut.

    Raises:
        BadReplyError: the body does not answer the request.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReplyError(f"the answer is not JSON: {error}") from None
    if not isinstance(data, dict) or "result" not in data:
        raise BadReplyError(f"the answer has no 'result' but is {_show(data)}")
    rows = data["result"]
    if rows == [] and queries == 1:  # a query without a hit, from the server that reranks
        rows = [[]]
    if not isinstance(rows, list) or len(rows) != queries:
        raise BadReplyError(f"'result' is not a list with a row for each of {queries} queries but {_show(rows)}")
    return [_read_row(row, topk) for row in rows]


def _read_row(row: object, topk: int) -> list[Passage]:
    if not isinstance(row, list):
        raise BadReplyError(f"a row of 'result' is not a list of documents but {_show(row)}")
    return [_read_item(item, rank) for rank, item in enumerate(row[:topk], start=1)]


def _read_item(item: object, rank: int) -> Passage:
    score = item.get("score") if isinstance(item, dict) and "document" in item else None
    document = json.dumps(_read_document(item)).encode()
    return Passage(document, float(score) if isinstance(score, int | float) else 1 / rank)


def _read_document(item: object) -> dict[str, Any]:
    document = item.get("document", item) if isinstance(item, dict) else item
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise BadReplyError(f"a document has no text under 'contents' but is {_show(document)}")
    if not isinstance(document.get("id"), str | int):
        text = document["contents"].encode("utf-8", "surrogatepass")
        document = {**document, "id": hashlib.sha256(text).hexdigest()[:ID_DIGITS]}
    return document


def _show(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= SHOWN_OF_REPLY else f"{text[:SHOWN_OF_REPLY]}…"
