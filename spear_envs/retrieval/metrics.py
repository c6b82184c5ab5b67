"""Prometheus metrics of the service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from spear_envs.retrieval.tally import Tally
from spear_sandbox.web.metrics import Families

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


COUNTERS = {
    "queries": "Queries of admitted requests, repeated ones included.",
    "hits": "Queries that the cache answered.",
    "joined": "Queries that waited for the same query of another or of the same request.",
    "batches": "Calls of the backend.",
    "failed_batches": "Batches in which the backend raised an error.",
    "skipped": "Queries not computed because nobody waited for them any more.",
    "rejected": "Requests turned away because the queue was full.",
    "timeouts": "Requests not answered within the deadline.",
}
BACKEND_COUNTERS = {
    "requests": "Requests to third-party servers, retries included.",
    "cost": "Price of these requests.",
}


def collect_metrics(tally: Tally, pending: int, counts: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Yield all current metrics of the service; ``counts`` are those of each index's backend, by name."""
    make = Families("spear_retriever_")
    for name, text in COUNTERS.items():
        yield make.count(name, text, getattr(tally, name))
    yield make.count_by("answers", "Answers of /retrieve by HTTP status.", "status", tally.answers)
    yield make.gauge("queue_length", "Distinct queries that wait or are computed.", pending)
    yield make.histogram("batch_queries", "Queries of a batch.", tally.batch_queries)
    yield make.histogram("request_seconds", "Seconds until a request is answered.", tally.request_seconds)
    for name, text in BACKEND_COUNTERS.items():
        if of := {index: values[name] for index, values in counts.items() if name in values}:
            yield make.count_by(f"backend_{name}", text, "index", of)
