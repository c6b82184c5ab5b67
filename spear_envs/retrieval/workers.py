"""Several processes that answer at one address over the same mapped index.

uvicorn's own ``workers=`` also restarts dead ones, but without the bounds on connections of our server and without a
notice when the indexes are open or why they cannot be, and its workers outlive a killed parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.service import Load, RetrievalService, ServiceSettings, serve
from spear_sandbox.web.listening import bind_socket
from spear_sandbox.web.serving import on_signals

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


logger = logging.getLogger(__name__)

RESTART_S, LONGEST_RESTART_S = 1.0, 30.0
"""Delay before a dead worker is restarted; doubled after each failure in a row."""
STOP_S = 15.0
"""Time for workers to stop, longer than their own drain."""


@dataclass(frozen=True)
class Job:
    """The indexes that a worker serves, and its address."""

    load: Load
    settings: ServiceSettings
    host: str
    port: int


@dataclass
class _Process:
    """A worker. It reports once on ``told`` that it is ready, or its error, and ends with the pipe."""

    process: BaseProcess
    told: Connection
    failures: int = 0
    restart_at: float | None = None


def serve_workers(job: Job, number: int, on_ready: Callable[[str], None]) -> None:
    """Serve with ``number`` processes until SIGINT or SIGTERM.

    The kernel distributes the connections. A worker that dies is restarted while the others answer. Each worker has its
    own queue, cache and metrics.

    Args:
        job: its port is not 0 and free.
        number: at least 1.
        on_ready: called with a summary of the indexes when all workers answer.

    Raises:
        SpearError: a worker cannot open its indexes.
    """
    stop = threading.Event()
    workers = [_start(job) for _ in range(number)]
    with on_signals(stop.set):
        try:
            served = [_hear(worker, stop) for worker in workers]
            if not stop.is_set():
                on_ready(served[0])
            while not stop.is_set():
                _look_after(workers, job)
        finally:
            _end(workers)


def _start(job: Job, failures: int = 0) -> _Process:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(job, theirs), name="retriever")
    process.start()
    theirs.close()
    return _Process(process, ours, failures)


def _hear(worker: _Process, stop: threading.Event) -> str:
    """Wait for a worker's report and return its summary."""
    while not stop.is_set():
        if worker.told.poll(0.2):
            try:
                is_ready, said = worker.told.recv()
            except EOFError:
                worker.process.join()
                is_ready, said = False, f"a worker ended with status {worker.process.exitcode} before it could serve."
            if not is_ready:
                raise SpearError(said)
            return str(said)
    return ""


def _look_after(workers: list[_Process], job: Job) -> None:
    """Wait for an event, half a second at most, and restart workers that died."""
    happened = wait([worker.told for worker in workers if worker.restart_at is None], timeout=0.5)
    for index, worker in enumerate(workers):
        if worker.restart_at is not None:
            if time.monotonic() >= worker.restart_at:
                workers[index] = _start(job, worker.failures)
        elif worker.told in happened:
            with contextlib.suppress(EOFError):
                is_ready, _ = worker.told.recv()
                if is_ready:
                    worker.failures = 0
                    continue
            worker.process.join()
            delay = min(RESTART_S * 2**worker.failures, LONGEST_RESTART_S)
            ended = worker.process.pid, worker.process.exitcode
            logger.warning("worker %d ended with status %s; another starts in %g s", *ended, delay)
            worker.failures += 1
            worker.restart_at = time.monotonic() + delay


def _end(workers: list[_Process]) -> None:
    for worker in workers:
        worker.told.close()
        if worker.process.is_alive():
            worker.process.terminate()
    end = time.monotonic() + STOP_S
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(job: Job, told: Connection) -> None:
    """Serve, in a worker process, until a signal or until the parent ends."""
    service = RetrievalService(job.load, job.settings)

    def follow_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            told.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        listener = bind_socket(job.host, job.port, shared=True)
        threading.Thread(target=follow_parent, daemon=True).start()
        serve(service, listener, lambda: told.send((True, service.summarize())))
    except (SpearError, ModuleNotFoundError) as error:
        with contextlib.suppress(OSError):  # the parent has heard of another worker's
            told.send((False, str(error)))
        sys.exit(1)
