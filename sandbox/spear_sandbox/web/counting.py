"""Counts of a service; plain numbers, so that counting costs next to nothing."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of values by upper bound, as Prometheus has them.

    Args:
        bounds: upper bounds, rising; what is above the last is counted too.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
