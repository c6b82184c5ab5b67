"""Counts in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Families:
    """Makes metrics whose names share a prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def count(self, name: str, text: str, value: float) -> Metric:
        """Make a counter."""
        return CounterMetricFamily(self.prefix + name, text, value=value)

    def count_by(self, name: str, text: str, label: str, counts: Mapping[str, float] | Mapping[int, int]) -> Metric:
        """Make counters that differ in a label."""
        family = CounterMetricFamily(self.prefix + name, text, labels=[label])
        for key, value in sorted(counts.items()):
            family.add_metric([str(key)], value)
        return family

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Make a gauge."""
        return GaugeMetricFamily(self.prefix + name, text, value=value)

    def label(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        """Make a gauge of 1 that carries labels."""
        family = GaugeMetricFamily(self.prefix + name, text, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Make a histogram."""
        buckets, seen = [], 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return HistogramMetricFamily(self.prefix + name, text, buckets=buckets, sum_value=histogram.total)


class MetricsPage(Collector):
    """Renders a service's metrics, which ``collect`` yields, and those of its process, on demand."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        return self._collect()

    def render(self) -> bytes:
        """Render the page."""
        return generate_latest(self._registry)
