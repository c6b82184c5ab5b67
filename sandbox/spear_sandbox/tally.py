"""Counts of the service; plain numbers, so that counting is cheap."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spear_sandbox.web.counting import Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _count_seconds() -> Histogram:
    return Histogram(SECONDS)


@dataclass
class Tally:
    """Counts since the start of the service."""

    running: int = 0
    runs: int = 0
    """Runs carried out, however they ended."""
    ended: Counter[str] = field(default_factory=Counter)
    """Of them, by status: ``success``, ``failed``, ``time_limit``."""
    killed: Counter[str] = field(default_factory=Counter)
    """Of them, those ended by a limit, by its name."""
    faults: int = 0
    """Runs that the sandbox failed to carry out."""
    gateway_timeouts: int = 0
    """Requests that waited for a place in vain."""
    gone: int = 0
    """Requests whose sender left before the answer; their runs were dropped or killed."""
    answers: Counter[int] = field(default_factory=Counter)
    """Answers of ``/run_code`` by HTTP status."""
    cpu_seconds: float = 0.0
    """CPU time of all runs."""
    queue_seconds: Histogram = field(default_factory=_count_seconds)
    run_seconds: Histogram = field(default_factory=_count_seconds)
    """Wall time of runs, without their wait."""
    request_seconds: Histogram = field(default_factory=_count_seconds)
    """Of ``/run_code``, whatever the answer."""
