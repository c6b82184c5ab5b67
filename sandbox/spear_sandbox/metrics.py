"""The service's counts in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from spear_sandbox.admission import Admission
from spear_sandbox.protocol import Health
from spear_sandbox.tally import SECONDS, Histogram, Tally

__all__ = ["CONTENT_TYPE", "MetricsPage"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "spear_sandbox_"


class MetricsPage:
    """Renders the service's state on demand.

    Args:
        tally, admission: read anew each time.
        find_health: of the executor.
    """

    def __init__(self, tally: Tally, admission: Admission, find_health: Callable[[], Health]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(tally, admission, find_health))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)


class _ServiceCollector(Collector):
    def __init__(self, tally: Tally, admission: Admission, find_health: Callable[[], Health]) -> None:
        self._tally = tally
        self._admission = admission
        self._find_health = find_health

    def collect(self) -> Iterator[Metric]:
        tally, health = self._tally, self._find_health()
        yield _count_by("runs", "Runs that were carried out, by how they ended.", "ended", tally.ended)
        yield _count_by("killed", "Runs that a limit ended, by the limit.", "reason", tally.killed)
        yield _count_by("answers", "Answers of /run_code by HTTP status.", "status", tally.answers)
        yield _count("faults", "Runs that failed through the sandbox itself.", tally.faults)
        yield _count("gateway_timeouts", "Requests for which no place became free in time.", tally.gateway_timeouts)
        yield _count("gone", "Requests whose sender did not wait for the answer.", tally.gone)
        yield _count("run_cpu_seconds", "CPU time of all runs.", tally.cpu_seconds)
        yield _count("zygote_restarts", "Zygotes started in the place of dead ones.", health.restarts)
        yield _gauge("zygotes", "Zygotes that live.", health.zygotes)
        yield _gauge("running", "Runs under way.", tally.running)
        yield _gauge("queued", "Requests that wait for a place.", self._admission.queued)
        yield _gauge("max_running", "Places.", self._admission.places)
        yield _gauge("healthy", "1 if runs can be started.", float(health.ok))
        isolation = GaugeMetricFamily(PREFIX + "isolation", "The level in use.", labels=["level", "weak"])
        isolation.add_metric([health.level.value, str(health.level.weak).lower()], 1)
        yield isolation
        yield _make_histogram("queue_seconds", "Seconds until a run has its place.", tally.queue_seconds)
        yield _make_histogram("run_seconds", "Wall time of runs, without their wait.", tally.run_seconds)
        yield _make_histogram("request_seconds", "Seconds until a request is answered.", tally.request_seconds)


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _count_by(name: str, text: str, label: str, counts: dict[str, int] | dict[int, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in sorted(counts.items()):
        family.add_metric([str(key)], value)
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _make_histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, seen = [], 0
    for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
        seen += count
        buckets.append((bound, seen))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=histogram.total)
