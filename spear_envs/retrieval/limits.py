"""Limits of the retrieval service: of a request, of batches, and of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from spear_envs.retrieval.retriever import MAX_CHARACTERS, MAX_TOPK
from spear_sandbox.options import option


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request."""

    topk: int = MAX_TOPK
    hits: int = 250_000
    """Most queries times ``topk`` of a request, which is what an answer may hold."""
    characters: int = MAX_CHARACTERS
    """Most characters of one query."""
    body_bytes: int = 64 << 20
    separators: int = 500_000
    """Commas and opening brackets in the body, outside strings. Each makes an object when JSON is read, which stops all
    other requests."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of admission and batches."""

    pending: int = option(
        4096, "Distinct queries that may wait; more are answered with 503.", flag="max-pending", at_least=1
    )
    deadline_s: float = option(30.0, "Seconds after which a request is answered with 504.", flag="deadline", above=0)
    batch_queries: int = option(16, "Queries of a batch; 64-256 on GPU.", at_least=1)
    batch_tokens: int = option(512, "Padded tokens of a batch, for encoders.", at_least=1)
    window: int = 256
    """Queries that are sorted by length together. Windows are in order of arrival, so queries do not starve."""
    depths: tuple[int, ...] = (10, 100)
    """Hits requested from the retriever: the least depth that covers ``k``. So results depend neither on neighbours in
    the batch nor on the cache, and one entry answers several ``k``."""


@dataclass(frozen=True)
class ServiceSettings:
    """Everything but the indexes."""

    requests: RequestLimits = field(default_factory=RequestLimits)
    batches: BatchLimits = field(default_factory=BatchLimits)
    cache_bytes: int = option(64 << 20, "Room for past results.", flag="cache-mb", at_least=0, unit=1 << 20)
    """Bytes of the caches of all indexes together."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that ``/retrieve`` and ``/metrics`` require; None requires none."""
    local: bool = False
    """Whether the service listens on the loopback interface and refuses requests for another host name."""
