"""Searches over HTTP: one pool of connections a process, servers in turn, retries, budgets, and Search-R1's client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.retriever import (
    TOKEN_VARIABLE,
    FaultKind,
    Load,
    Passage,
    Retriever,
    RetrieverFault,
    RetrieverRefusal,
)
from spear_sandbox.web.endpoints import (
    Backoff,
    EndpointRing,
    Service,
    bound_answers,
    read_detail,
    read_retry_after,
    read_urls,
)
from spear_sandbox.web.listening import read_token

if TYPE_CHECKING:
    import httpx


Result = TypeVar("Result")
CONNECT_S = 5.0
KEEPALIVE_S = 4.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one."""
WRONG_KEY = frozenset({401, 402, 403})
PASSING = frozenset({408, 429, *range(500, 600)})
SEARCH_PASSING = frozenset({429, 502, 503})
"""Not 500, which may be due to the query, and not 504, which has used up the time."""
REFUSALS = frozenset({400, 403, 413, 422})
UNKNOWN_PATH = REFUSALS | {501}
"""Statuses of ``/health`` that gateways and small servers give for any path that they do not know, besides 404."""
SERVICE = Service("a retrieval service", "/retrieve", 8000, TOKEN_VARIABLE)
QUERIES = 16
"""Queries of one request, where a service asks another."""
PLAIN_QUERY = "Paris"
"""Asked of a server that failed at its first search."""
EXPECTED_REPLY = '{"result": [[{"document": {"contents": "…"}, "score": 1.0}, …], …]}'
SHOWN_OF_REPLY = 120
ID_DIGITS = 32
"""Hex digits of SHA-256 in the id of a document that came without one."""


class HttpSession:
    """An event loop on its own thread, and an HTTP client on that loop."""

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SpearError(
                "asking a retrieval service needs httpx: pip install 'spear-envs[retriever]' brings it."
            ) from error
        self.client: httpx.AsyncClient = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S),
            headers={"User-Agent": "spear-envs"},
            # A proxy from the environment would be asked for 127.0.0.1, too.
            trust_env=False,
        )
        bound_answers(self.client)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="retrieval-client", daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the session's loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)


_lock = threading.Lock()
_session: HttpSession | None = None
_of_parents: list[HttpSession] = []
"""Sessions of the parents, kept in forked children so that none is finalised there."""


def share_session() -> HttpSession:
    """Return the session of this process, made at the first call and again in a forked child, which lacks its thread.

    Raises:
        SpearError: httpx is not installed.
    """
    global _session
    with _lock:
        if _session is None:
            _session = HttpSession()
        return _session


def _forget_session() -> None:
    """Drop the session in a forked child: its thread is gone, the sockets are the parent's, the lock may stay taken."""
    global _lock, _session
    _lock = threading.Lock()
    if _session is not None:
        _of_parents.append(_session)
    _session = None


with contextlib.suppress(AttributeError):  # not on platforms without fork
    os.register_at_fork(after_in_child=_forget_session)


@dataclass(frozen=True)
class Call:
    """One HTTP request, to the server whose turn it is."""

    method: str
    path: str
    content: bytes | None = None
    params: Mapping[str, str] = field(default_factory=dict)


HEALTH = Call("GET", "/health")


@dataclass
class Budget:
    """Cost of requests and its limits, counted in this process."""

    max_requests: int | None = None
    max_cost: float | None = None
    price: float = 0.0
    """Cost of one request."""
    requests: int = 0

    @property
    def cost(self) -> float:
        """Return the cost of all requests so far."""
        return self.requests * self.price

    def take(self) -> None:
        """Count a request before it is sent.

        Raises:
            RetrieverRefusal: it exceeds the budget.
        """
        if self.max_requests is not None and self.requests >= self.max_requests:
            raise RetrieverRefusal(f"the budget is spent: max_requests is {self.max_requests:,}.")
        if self.max_cost is not None and self.cost + self.price > self.max_cost + 1e-9:
            raise RetrieverRefusal(
                f"the budget is spent by {self.requests:,} requests at {self.price:g}: max_cost is {self.max_cost:g}."
            )
        self.requests += 1

    def describe(self) -> dict[str, Any]:
        """Return the limits as plain values."""
        return {"max_requests": self.max_requests, "max_cost": self.max_cost, "cost_per_request": self.price}


@dataclass
class Asker:
    """Sends requests to the servers of one service in turn, from any thread, loop or forked child.

    A failing server is left out for a while, or as long as its ``Retry-After`` says. Proxies of the environment
    are not used.
    """

    urls: tuple[str, ...]
    """Base addresses, without a trailing slash."""
    deadline_s: float
    """Seconds for all tries of a request together."""
    tries: int
    """Most times that a request is sent."""
    passing: frozenset[int] = PASSING
    """Statuses that are retried, like connection errors."""
    backoff: Backoff = field(default_factory=Backoff)
    """Policy that says how long a failing server is left out."""
    budget: Budget = field(default_factory=Budget)
    """Limits of cost, counted at each sending."""
    headers: Callable[[], Mapping[str, str]] = dict
    """Function that makes the headers of each request, so that keys are not kept."""
    key: str = "the key"
    """Name of the key that a refused user has to check."""
    _ring: EndpointRing | None = field(default=None, init=False)
    _ring_pid: int = field(default=0, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ring": None, "_ring_pid": 0}

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the process's loop and wait; Ctrl-C cancels it."""
        try:
            session = share_session()
        except SpearError:
            work.close()
            raise
        future = session.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def gather(self, work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run coroutines concurrently on the process's loop, and wait for all.

        Raises:
            RetrieverFault, RetrieverRefusal: of the first that failed.
        """

        async def run() -> list[Result | BaseException]:
            return await asyncio.gather(*work, return_exceptions=True)

        results = self.run(run())
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    async def require(self, call: Call) -> httpx.Response:
        """Return the first answer with status 200.

        Raises:
            RetrieverFault: there was none in time.
            RetrieverRefusal: the server refused the request or the key, or the budget is spent.
        """
        response = await self.ask(call)
        if response.status_code == 200:
            return response
        mend = self.key if response.status_code in WRONG_KEY else "the settings of this index"
        raise RetrieverRefusal(f"{describe_answer(response)}; check {mend}.")

    async def ask(self, call: Call) -> httpx.Response:
        """Return the first answer whose status is not retried.

        Raises:
            RetrieverFault: there was none in time.
            RetrieverRefusal: the budget is spent.
        """
        import httpx

        loop = asyncio.get_running_loop()
        if self._ring is None or self._ring_pid != os.getpid():  # forked children have their own
            self._ring, self._ring_pid = EndpointRing(self.urls, self.backoff, random.Random()), os.getpid()
        ring = self._ring
        end = loop.time() + self.deadline_s
        failure, sent = "", 0
        while sent < self.tries:
            endpoint = ring.choose(loop.time())
            wait = endpoint.free_from - loop.time()
            if wait > 0:
                wait += ring.choose_delay()
                left = end - loop.time()
                if failure and wait >= left:
                    break
                await asyncio.sleep(min(wait, left / 2))  # a server that failed for others is tried at least once
            sent += 1
            try:
                response = await self.send(call, endpoint.url, end - loop.time())
            except asyncio.TimeoutError:
                ring.note_failure(endpoint, loop.time())
                raise RetrieverFault(
                    FaultKind.TIMEOUT, f"no answer from {endpoint.url} within {self.deadline_s:g} s, at try {sent}."
                ) from None
            except httpx.DecodingError as error:
                raise RetrieverFault(FaultKind.BAD_REPLY, f"{endpoint.url}: {error}.") from None
            except httpx.HTTPError as error:
                failure = f"{endpoint.url} cannot be reached ({type(error).__name__}: {error})"
                ring.note_failure(endpoint, loop.time())
                continue
            if response.status_code not in self.passing:
                if response.status_code >= 500:
                    ring.note_failure(endpoint, loop.time())
                else:
                    ring.note_success(endpoint)
                return response
            failure = describe_answer(response)
            ring.note_failure(endpoint, loop.time(), read_retry_after(response.headers))
        raise RetrieverFault(FaultKind.UNAVAILABLE, f"{failure}; after {sent} of {self.tries} tries.")

    async def send(self, call: Call, url: str, seconds: float) -> httpx.Response:
        """Return the answer of one server, whatever its status.

        Raises:
            RetrieverRefusal: the budget is spent.
            httpx.HTTPError: it cannot be reached.
            asyncio.TimeoutError: it takes longer.
        """
        import httpx

        headers = {"Content-Type": "application/json"} if call.content is not None else {}
        headers.update(self.headers())
        self.budget.take()
        request = share_session().client.request(
            call.method,
            url + call.path,
            content=call.content,
            params=dict(call.params) or None,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
        return await asyncio.wait_for(request, max(seconds, 0.001))


def describe_answer(response: httpx.Response) -> str:
    """Describe address, status and message of an answer, on one line."""
    return f"{str(response.url).partition('?')[0]} answered {response.status_code}: {read_detail(response)}"


def read_json(response: httpx.Response) -> dict[str, Any]:
    """Read the JSON object of an answer.

    Raises:
        RetrieverFault: it is not one.
    """
    try:
        data = json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise RetrieverFault(FaultKind.BAD_REPLY, f"{response.url.host}: the answer is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise RetrieverFault(FaultKind.BAD_REPLY, f"{response.url.host}: the answer is not a JSON object.")
    return data


def read_key(variable: str) -> str:
    """Read the key in an environment variable.

    Raises:
        RetrieverRefusal: it is not set, or is not valid in a header.
    """
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        fault = "has characters that a key cannot have" if key else "is not set"
        raise RetrieverRefusal(f"the variable {variable} {fault}: put the key of the service into it.")
    return key


# ---------------------------------------------------------------- the service of Search-R1


class BadReplyError(Exception):
    """The body is not a valid answer; the message says why."""


class RetrieverClient(Retriever):
    """A retriever over HTTP: our service, Search-R1's, or a compatible one.

    All clients of a process share one pool of connections. A client may be used from any thread and forked child,
    and may be pickled. :class:`Asker` takes the servers in turn.

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
        self._proved: set[str] = set()
        self._asker = Asker(
            self.urls, deadline_s, tries, SEARCH_PASSING, backoff or Backoff(), headers=self._make_headers
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
                f"{server} does not answer like Search-R1's retrieval service: {error}. Expected is {EXPECTED_REPLY}."
            ) from None
        self._proved.add(server)
        return found

    async def _identify(self) -> str:
        """Find the common fingerprint of all servers that answer."""
        first = await self._asker.ask(HEALTH)
        if first.status_code not in UNKNOWN_PATH:
            await self._judge(first)
        others = [self._asker.send(HEALTH, url, self._asker.deadline_s) for url in self.urls if len(self.urls) > 1]
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
            raise RetrieverRefusal(f"{describe_answer(response)}: set {self._token_variable} to the service's token.")
        if status in REFUSALS:
            raise RetrieverRefusal(f"{describe_answer(response)}: it refused the request.")
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
        server = str(response.url)
        base = server.removesuffix(SERVICE.path)
        if base == server or server in self._proved:
            return
        # Several tries, since a server that fails may close the connection, too.
        asker = Asker((base,), self._asker.deadline_s, 3, frozenset(), headers=self._make_headers)
        with contextlib.suppress(RetrieverFault):
            probe = await asker.ask(Call("POST", SERVICE.path, write_request([PLAIN_QUERY], 1)))
            if probe.status_code == response.status_code:
                raise RetrieverRefusal(f"{describe_answer(probe)}, to the first search and to {PLAIN_QUERY!r}.")

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
    if not isinstance(score, int | float):
        return Passage(document, 1 / rank)
    if not abs(score) <= sys.float_info.max:  # nor NaN, nor an integer of hundreds of digits
        raise BadReplyError(f"a score is not a finite number but {_show(score)}")
    return Passage(document, float(score))


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
