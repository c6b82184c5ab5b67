"""The service's counts in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from spear_envs.retrieval.tally import Histogram, Tally

__all__ = ["CONTENT_TYPE", "MetricsPage"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "spear_retriever_"
COUNTERS = {
    "queries": "Queries of admitted requests, repeated ones included.",
    "hits": "Queries that the cache answered.",
    "joined": "Queries that waited for the same query of another or of the same request.",
    "batches": "Calls of the retriever.",
    "failed_batches": "Batches in which the retriever raised an error.",
    "skipped": "Queries not computed because nobody waited for them any more.",
    "rejected": "Requests turned away because the queue was full.",
    "timeouts": "Requests not answered within the deadline.",
}


class MetricsPage:
    """Renders a tally on demand.

    Args:
        tally: read anew each time.
        count_pending: distinct queries that wait or are computed now.
    """

    def __init__(self, tally: Tally, count_pending: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_TallyCollector(tally, count_pending))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)


class _TallyCollector(Collector):
    def __init__(self, tally: Tally, count_pending: Callable[[], int]) -> None:
        self._tally = tally
        self._count_pending = count_pending

    def collect(self) -> Iterator[Metric]:
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(self._tally, name))
        answers = CounterMetricFamily(PREFIX + "answers", "Answers of /retrieve by HTTP status.", labels=["status"])
        for status, count in sorted(self._tally.answers.items()):
            answers.add_metric([str(status)], count)
        yield answers
        yield GaugeMetricFamily(
            PREFIX + "queue_length", "Distinct queries that wait or are computed.", value=self._count_pending()
        )
        yield _make_histogram("batch_queries", "Queries of a batch.", self._tally.batch_queries)
        yield _make_histogram("request_seconds", "Seconds until a request is answered.", self._tally.request_seconds)


def _make_histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, seen = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        seen += count
        buckets.append((bound, seen))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=histogram.total)
