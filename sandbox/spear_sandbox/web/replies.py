"""Reading the answers of servers: bounded in size, their error messages, their ``Retry-After``."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


MOST_BYTES = 160 << 20
"""More than the largest answer of our services: 24 MiB of what a cell shows, each byte of it escaped."""
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
    """Seconds to wait, from either form of the header; None if it is missing or malformed."""
    value = headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError):
        return max(0.0, float(value)) if math.isfinite(float(value)) else None
    try:
        return min(max(0.0, parsedate_to_datetime(value).timestamp() - time()), longest_by_date_s)
    except (ValueError, TypeError, IndexError):
        return None
