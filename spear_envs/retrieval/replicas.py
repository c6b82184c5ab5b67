"""Replicas of the retrieval service under Ray Serve, over one corpus and index that they map."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.backend import summarize
from spear_envs.retrieval.server import RetrievalService, ServiceSettings, make_app
from spear_envs.retrieval.serving import spare_collections
from spear_envs.retrieval.source import AnySource

__all__ = ["Replicas", "make_deployment", "serve_replicas"]

NAME = "retriever"
OBJECT_STORE_BYTES = 80 << 20
"""Of the local Ray: only large answers pass through it."""
QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True)
class Replicas:
    """What the replicas serve, and how many they are. The files must be where each replica runs."""

    source: AnySource
    settings: ServiceSettings
    number: int


def make_deployment(replicas: Replicas) -> Any:
    """The application for ``ray.serve.run``, on whichever Ray cluster that is called.

    Each replica opens corpus and index itself; mapped files are in memory once for a machine. Caches and queues are
    each replica's own.
    """
    from ray import serve

    def build_app() -> Any:
        # In the replica: what cannot be opened fails the deployment with its own sentence.
        opened = replicas.source.open()
        spare_collections()
        return make_app(RetrievalService(lambda: opened, replicas.settings), lambda _: None)

    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas.number,
        # Above what a replica admits, so that it is the replica that turns requests away.
        max_ongoing_requests=2 * replicas.settings.batches.pending,
        ray_actor_options={"num_cpus": replicas.source.threads},
        logging_config=QUIET,
    )
    return deployment(serve.ingress(build_app)()).bind()


def serve_replicas(replicas: Replicas, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve from a Ray of this machine, which ends with the call, until SIGINT or SIGTERM.

    A replica that dies is started anew; meanwhile the others answer.

    Args:
        replicas: what is served.
        host: address to listen on.
        port: not 0.
        on_ready: hears what is served when all replicas are there.

    Raises:
        SpearError: Ray Serve is not installed, corpus or index cannot be opened, or a replica does not start.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        # Ray listens on more than the loopback address: nobody else shall give it work. Read when Ray is imported.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise SpearError(
            f"Ray Serve is not here ({error}): pip install 'spear-envs[search,serve]' brings it."
        ) from error
    opened = replicas.source.open()
    summary = summarize(opened)
    for backend in opened.values():
        backend.close()
    ray.init(
        "local",
        num_cpus=max(os.cpu_count() or 1, replicas.number * replicas.source.threads),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        try:
            serve.run(make_deployment(replicas), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise SpearError(f"the replicas did not start: {error}") from error
        stopped = threading.Event()
        # After Ray has set its own handlers, which print a trace.
        old = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            on_ready(summary)
            stopped.wait()
            serve.delete(NAME)
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
    finally:
        ray.shutdown()
