"""Counts of a service; plain numbers, so that counting is cheap."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of values by upper bound, as in Prometheus; the bounds rise, and values above the last are counted too."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
