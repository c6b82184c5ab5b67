"""Servers of one service: parsing their addresses, taking turns, and leaving out those that fail."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spear_sandbox.errors import SpearError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Service:
    """A kind of service, for parsing and explaining its addresses."""

    name: str
    """Name with its article: ``"a sandbox"``."""
    path: str
    """Path of its requests, which an address may end in: ``"/run_code"``."""
    port: int
    """Port of the example in messages."""
    token_variable: str
    """The environment variable with the token."""

    @property
    def mend(self) -> str:
        """Advice on writing an address."""
        return f"write, for instance, http://127.0.0.1:{self.port}."


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait after failures in a row: doubling from ``first`` up to ``longest``."""

    first: float = 0.1
    longest: float = 5.0
    jitter: float = 0.5
    """Share that is randomly taken off, so that many clients do not come back at once."""

    def choose_wait(self, failures: int, rng: random.Random | None = None) -> float:
        """Return the seconds after this number of failures in a row, at least 1; ``rng`` draws the jitter."""
        full = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        return full * (1 - self.jitter * (rng or random).random())


@dataclass(eq=False)
class Endpoint:
    """One server and its recent failures."""

    url: str
    failures: int = 0
    free_from: float = 0.0
    """Loop time before which others come first."""


class EndpointRing:
    """Servers taken in turn; ``backoff`` leaves failing ones out, with jitter from ``rng``. Belongs to one thread."""

    def __init__(self, urls: Sequence[str], backoff: Backoff, rng: random.Random) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._backoff = backoff
        self._rng = rng
        # Clients of many processes should not all begin with the first.
        self._next = rng.randrange(len(self._endpoints))

    def choose(self, now: float) -> Endpoint:
        """Take the next server that is not left out; if all are, the one that comes back first."""
        count = len(self._endpoints)
        turns = [self._endpoints[(self._next + step) % count] for step in range(count)]
        chosen = min(turns, key=lambda endpoint: max(endpoint.free_from, now))
        self._next = (self._endpoints.index(chosen) + 1) % count
        return chosen

    def choose_delay(self) -> float:
        """Return the random extra seconds, so that clients waiting for the same server spread out."""
        return self._backoff.first * self._rng.random()

    def note_success(self, endpoint: Endpoint) -> None:
        """Forget the server's failures: it answered."""
        endpoint.failures = 0
        endpoint.free_from = 0.0

    def note_failure(self, endpoint: Endpoint, now: float, retry_after: float | None = None) -> None:
        """Leave a failed server out for a while, at least as long as it asked for.

        Requests under way at the first failure fail with it and do not lengthen the wait.
        """
        wait = retry_after or 0.0
        if now >= endpoint.free_from:
            endpoint.failures += 1
            wait = max(wait, self._backoff.choose_wait(endpoint.failures, self._rng))
        endpoint.free_from = max(endpoint.free_from, now + wait)


def read_urls(urls: str | Sequence[str], service: Service) -> tuple[str, ...]:
    """Read base URLs, each once, without the service's path and trailing slashes. Raises SpearError for bad ones."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise SpearError(f"no address of {service.name} was given: {service.mend}")
    return tuple(dict.fromkeys(_read_url(str(url), service) for url in given))


def _read_url(url: str, service: Service) -> str:
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if "@" in url:  # every message about this service would show it
        host = url.rpartition("@")[2].partition("/")[0]
        raise SpearError(f"the address of {host} has a name or password in it: set {service.token_variable} instead.")
    is_whole = parts.scheme in ("http", "https") and parts.hostname and not re.search(r"\s", parts.netloc + parts.path)
    if not is_whole or port == 0 or parts.query or parts.fragment:
        raise SpearError(f"{url!r} is not an address of {service.name}: {service.mend}")
    path = parts.path.rstrip("/").removesuffix(service.path).rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


MOST_BYTES = 160 << 20
"""Bytes read of an answer: more than our services send, which is 24 MiB of a cell with each byte escaped."""
SHOWN_CHARACTERS = 200
LONGEST_BY_DATE_S = 60.0
"""The longest wait for a ``Retry-After`` with a date: its clock, or ours, may be wrong by hours."""


def bound_answers(client: httpx.AsyncClient, most_bytes: int = MOST_BYTES) -> None:
    """Have a client read at most this many bytes of an answer, which must not be compressed.

    Some kilobytes can unpack to gigabytes, and an answer need not end. Either raises DecodingError, of httpx or of
    httpx2, which the package mcp uses.
    """
    httpx: Any = importlib.import_module(type(client).__module__.partition(".")[0])

    class Bounded(httpx.AsyncByteStream):
        def __init__(self, response: httpx.Response) -> None:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            self._stream, self._request = response.stream, response.request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = most_bytes
            async for chunk in self._stream:
                left -= len(chunk)
                if left < 0:
                    raise httpx.DecodingError(f"the answer has more than {most_bytes} bytes", request=self._request)
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx.Response) -> None:
        packed = response.headers.get("content-encoding", "identity").lower()
        if packed != "identity":
            await response.aclose()
            raise httpx.DecodingError(
                f"the answer is packed ({packed[:40]!a}), which was not accepted", request=response.request
            )
        response.stream = Bounded(response)

    client.headers["Accept-Encoding"] = "identity"
    client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks["response"], bound]}


def read_detail(response: httpx.Response) -> str:
    """Read the message of an error, on one line, or the beginning of whatever arrived.

    FastAPI's list of validation errors becomes ``body.queries: Field required``.
    """
    try:
        detail = json.loads(response.content)["detail"]
    except (ValueError, RecursionError, KeyError, TypeError):
        detail = response.text
    with contextlib.suppress(KeyError, TypeError):
        detail = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in detail)
    return " ".join(str(detail).split())[:SHOWN_CHARACTERS]


def read_retry_after(headers: Mapping[str, str], longest_by_date_s: float = LONGEST_BY_DATE_S) -> float | None:
    """Return the seconds to wait, from either form of the header; None if it is missing or malformed."""
    value = headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError):
        return max(0.0, float(value)) if math.isfinite(float(value)) else None
    try:
        return min(max(0.0, parsedate_to_datetime(value).timestamp() - time()), longest_by_date_s)
    except (ValueError, TypeError, IndexError):
        return None
