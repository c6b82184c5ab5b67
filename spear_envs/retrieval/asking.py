"""Requests to servers over HTTP: one pool of connections for each process, turns, retries, deadlines and budgets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.retriever import FaultKind, RetrieverFault, RetrieverRefusal
from spear_sandbox.web.endpoints import Backoff, EndpointRing
from spear_sandbox.web.replies import bound_answers, read_detail, read_retry_after

if TYPE_CHECKING:
    import httpx


Result = TypeVar("Result")
CONNECT_S = 5.0
WRONG_KEY = frozenset({401, 402, 403})
PASSING = frozenset({408, 429, *range(500, 600)})
MAX_CONNECTIONS = 256
KEPT_CONNECTIONS = 64
KEEPALIVE_S = 4.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one."""


class HttpSession:
    """An event loop on its own thread, and an HTTP client on that loop."""

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SpearError(
                "asking a retrieval service needs httpx: pip install 'spear-envs[retriever]' brings it."
            ) from error
        limits = httpx.Limits(
            max_connections=MAX_CONNECTIONS, max_keepalive_connections=KEPT_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
        )
        self.client: httpx.AsyncClient = httpx.AsyncClient(
            limits=limits,
            follow_redirects=False,
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
    """In a forked child the thread is gone, the sockets are the parent's, and the lock may never be released."""
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


@dataclass
class Budget:
    """Cost of requests and its limits, counted in this process."""

    max_requests: int | None = None
    max_cost: float | None = None
    price: float = 0.0
    """Of one request."""
    requests: int = 0

    @property
    def cost(self) -> float:
        """Of all requests so far."""
        return self.requests * self.price

    def take(self) -> None:
        """Count a request before it is sent.

        Raises:
            RetrieverRefusal: it exceeds the budget.
        """
        if self.max_requests is not None and self.requests >= self.max_requests:
            raise RetrieverRefusal(f"the budget of {self.max_requests:,} requests is spent: raise max_requests.")
        if self.max_cost is not None and self.cost + self.price > self.max_cost + 1e-9:
            raise RetrieverRefusal(
                f"the budget of {self.max_cost:g} is spent, by {self.requests:,} requests at {self.price:g}: raise "
                "max_cost."
            )
        self.requests += 1

    def describe(self) -> dict[str, Any]:
        """The limits."""
        return {"max_requests": self.max_requests, "max_cost": self.max_cost, "cost_per_request": self.price}


class Asker:
    """Sends requests to the servers of one service in turn, from any thread, loop or forked child.

    A failing server is left out for a while, or as long as its ``Retry-After`` says. Proxies of the environment
    are not used.

    Args:
        urls: base addresses, without a trailing slash.
        deadline_s: for all tries of a request together.
        tries: how often a request is sent at most.
        passing: statuses that are retried, like connection errors.
        backoff: how long a failing server is left out.
        budget: counted at each sending.
        headers: called for each request, so that keys are not kept.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        deadline_s: float,
        tries: int,
        passing: frozenset[int] = PASSING,
        backoff: Backoff | None = None,
        budget: Budget | None = None,
        headers: Callable[[], Mapping[str, str]] = dict,
        key: str = "the key",
    ) -> None:
        self.urls = tuple(urls)
        self.budget = budget or Budget()
        self._deadline_s = deadline_s
        self._tries = tries
        self._passing = passing
        self._backoff = backoff or Backoff()
        self._headers = headers
        self._key = key
        self._ring: EndpointRing | None = None
        self._ring_pid = 0

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
        mend = self._key if response.status_code in WRONG_KEY else "the settings of this index"
        raise RetrieverRefusal(f"{describe_answer(response)}; check {mend}.")

    async def ask(self, call: Call) -> httpx.Response:
        """Return the first answer whose status is not retried.

        Raises:
            RetrieverFault: there was none in time.
            RetrieverRefusal: the budget is spent.
        """
        import httpx

        loop = asyncio.get_running_loop()
        ring = self._find_ring()
        end = loop.time() + self._deadline_s
        failure, sent = "", 0
        while sent < self._tries:
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
                    FaultKind.TIMEOUT, f"no answer from {endpoint.url} within {self._deadline_s:g} s, at try {sent}."
                ) from None
            except httpx.DecodingError as error:
                raise RetrieverFault(FaultKind.BAD_REPLY, f"{endpoint.url}: {error}.") from None
            except httpx.HTTPError as error:
                failure = f"{endpoint.url} cannot be reached ({type(error).__name__}: {error})"
                ring.note_failure(endpoint, loop.time())
                continue
            if response.status_code not in self._passing:
                if response.status_code >= 500:
                    ring.note_failure(endpoint, loop.time())
                else:
                    ring.note_success(endpoint)
                return response
            failure = describe_answer(response)
            ring.note_failure(endpoint, loop.time(), read_retry_after(response.headers))
        raise RetrieverFault(FaultKind.UNAVAILABLE, f"{failure}; after {sent} of {self._tries} tries.")

    async def send(self, call: Call, url: str, seconds: float) -> httpx.Response:
        """Return the answer of one server, whatever its status.

        Raises:
            RetrieverRefusal: the budget is spent.
            httpx.HTTPError: it cannot be reached.
            asyncio.TimeoutError: it takes longer.
        """
        import httpx

        headers = {"Content-Type": "application/json"} if call.content is not None else {}
        headers.update(self._headers())
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

    def _find_ring(self) -> EndpointRing:
        """The ring of this process; forked children have their own."""
        if self._ring is None or self._ring_pid != os.getpid():
            self._ring = EndpointRing(self.urls, self._backoff, random.Random())
            self._ring_pid = os.getpid()
        return self._ring


def describe_answer(response: httpx.Response) -> str:
    """Describe address, status and message of an answer, on one line."""
    url = str(response.url).partition("?")[0]
    return f"{url} answered {response.status_code}: {read_detail(response)}"


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
    if not key:
        raise RetrieverRefusal(f"the variable {variable} is not set: put the key of the service into it.")
    if not key.isascii() or not key.isprintable():
        raise RetrieverRefusal(f"the variable {variable} has characters that a key cannot have: set it again.")
    return key


def digest_plain(plain: Any) -> str:
    """SHA-256 (hex) of plain data."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode("ascii")).hexdigest()
