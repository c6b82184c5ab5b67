"""Counters of the service; plain numbers, so that counting is cheap."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spear_sandbox.web.counting import Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass
class Tally:
    """Counts since the start of the service."""

    queries: int = 0
    """Queries of admitted requests, repeated ones included."""
    hits: int = 0
    """Queries that the cache answered."""
    joined: int = 0
    """Queries that waited for the same query of this or another request."""
    batches: int = 0
    failed_batches: int = 0
    """Batches in which the retriever raised an error."""
    skipped: int = 0
    """Queries that were dropped because nobody waited for them any more."""
    rejected: int = 0
    """Requests that the full queue refused."""
    timeouts: int = 0
    """Requests that were not answered within the deadline."""
    batch_queries: Histogram = field(default_factory=lambda: Histogram(SIZES))
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Times of ``/retrieve``, all statuses included."""
    answers: Counter[int] = field(default_factory=Counter)
    """Answers of ``/retrieve`` by HTTP status."""
