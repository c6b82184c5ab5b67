"""Counters of the service; plain numbers, so that counting is cheap."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spear_sandbox.web.counting import Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass
class Tally:
    """Counts since the start of the service; ``metrics.COUNTERS`` says of what."""

    queries: int = 0
    hits: int = 0
    joined: int = 0
    batches: int = 0
    failed_batches: int = 0
    skipped: int = 0
    rejected: int = 0
    timeouts: int = 0
    batch_queries: Histogram = field(default_factory=lambda: Histogram(SIZES))
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Times of ``/retrieve``, all statuses included."""
    answers: Counter[int] = field(default_factory=Counter)
    """Answers of ``/retrieve`` by HTTP status."""
