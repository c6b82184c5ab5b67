"""Replicas of the retrieval service under Ray Serve, over one corpus and index that they map."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.server import RetrievalService, ServiceSettings, make_app
from spear_envs.retrieval.source import open_source

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Replicas", "make_deployment", "serve_replicas"]

NAME = "retriever"


@dataclass(frozen=True)
class Replicas:
    """What the replicas serve, and how many they are. The files must be where each replica runs."""

    corpus: Path | None
    kind: str
    index: Path | None
    settings: ServiceSettings
    number: int = 2
    max_ongoing: int = 256
    """Requests that one replica works on at a time."""
    cpus: float = 1.0
    """Of one replica, as Ray counts them."""


def make_deployment(replicas: Replicas) -> Any:
    """The application for ``ray.serve.run``, to be combined with others or deployed from a configuration.

    Each replica opens corpus and index itself; mapped files are in memory once for a machine. Caches are each
    replica's own.
    """
    from ray import serve

    def build_app() -> FastAPI:
        # In the replica: what cannot be opened fails the deployment with its own sentence.
        source = open_source(replicas.corpus, replicas.kind, replicas.index)
        return make_app(RetrievalService(lambda: source, replicas.settings), lambda _: None)

    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas.number,
        max_ongoing_requests=replicas.max_ongoing,
        ray_actor_options={"num_cpus": replicas.cpus},
    )
    return deployment(serve.ingress(build_app)()).bind()


def serve_replicas(replicas: Replicas, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, on a Ray cluster that is there or a local one that ends with the call.

    Raises:
        SpearError: Ray Serve is not installed, or a replica cannot start.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise SpearError(f"Ray Serve is not here ({error}): pip install -e '.[serve]' brings it.") from error
    stopped = threading.Event()
    old = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    is_ours = not ray.is_initialized()
    try:
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(make_deployment(replicas), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise SpearError(f"the replicas did not start: {error}") from error
        on_ready()
        stopped.wait()
    finally:
        serve.shutdown()
        if is_ours:
            ray.shutdown()
        for number, handler in old.items():
            signal.signal(number, handler)
