"""Replicas of the retrieval service under Ray Serve, over one corpus and index that they map."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.server import RetrievalService, ServiceSettings, make_app
from spear_envs.retrieval.source import Source

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Replicas", "make_deployment", "serve_replicas"]

NAME = "retriever"
OBJECT_STORE_BYTES = 80 << 20
"""Of a local Ray: answers pass through it only when they are large."""


@dataclass(frozen=True)
class Replicas:
    """What the replicas serve, and how many they are. The files must be where each replica runs."""

    source: Source
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
        opened = replicas.source.open()
        return make_app(RetrievalService(lambda: opened, replicas.settings), lambda _: None)

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
    address = os.environ.get("RAY_ADDRESS", "local")
    if address == "local":
        # Ray 2.60 would else write a token into the home directory, and ask for it.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False)
    else:
        ray.init(address, log_to_driver=False)
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
        ray.shutdown()
        for number, handler in old.items():
            signal.signal(number, handler)
