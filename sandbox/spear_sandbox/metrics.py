"""Counts of the service, plain numbers so that counting is cheap, and its Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spear_sandbox.admission import Admission
from spear_sandbox.protocol import Health
from spear_sandbox.web.counting import Histogram
from spear_sandbox.web.metrics import Families

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_count_seconds = partial(Histogram, (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0))


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


def collect_metrics(tally: Tally, admission: Admission, health: Health) -> Iterator[Metric]:
    """Yield all current metrics of the service."""
    make = Families("spear_sandbox_")
    yield make.count_by("runs", "Runs that were carried out, by how they ended.", "ended", tally.ended)
    yield make.count_by("killed", "Runs that a limit ended, by the limit.", "reason", tally.killed)
    yield make.count_by("answers", "Answers of /run_code by HTTP status.", "status", tally.answers)
    yield make.count("faults", "Runs that failed through the sandbox itself.", tally.faults)
    yield make.count("gateway_timeouts", "Requests for which no place became free in time.", tally.gateway_timeouts)
    yield make.count("gone", "Requests whose sender did not wait for the answer.", tally.gone)
    yield make.count("run_cpu_seconds", "CPU time of all runs.", tally.cpu_seconds)
    yield make.count("zygote_restarts", "Zygotes started to replace dead ones.", health.restarts)
    yield make.gauge("zygotes", "Zygotes that live.", health.zygotes)
    yield make.gauge("running", "Runs under way.", tally.running)
    yield make.gauge("queued", "Requests that wait for a place.", admission.queued)
    yield make.gauge("max_running", "Places.", admission.places)
    yield make.gauge("healthy", "1 if runs can be started.", float(health.ok))
    level = {"level": health.level.value, "weak": str(health.level.weak).lower()}
    yield make.label("isolation", "The level in use.", level)
    yield make.histogram("queue_seconds", "Seconds until a run has its place.", tally.queue_seconds)
    yield make.histogram("run_seconds", "Wall time of runs, without their wait.", tally.run_seconds)
    yield make.histogram("request_seconds", "Seconds until a request is answered.", tally.request_seconds)
