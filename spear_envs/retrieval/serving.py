"""Running the service in this process until a signal stops it."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable

from spear_envs.retrieval.server import RetrievalService, make_app
from spear_sandbox.web.serving import make_server, stop_on_signals

DRAIN_S = 10
"""Time for requests under way after a signal to stop."""


def spare_collections() -> None:
    """Exempt loaded data from garbage collection: a full collection would stop all callers for tens of milliseconds."""
    gc.collect()
    gc.freeze()


def serve(service: RetrievalService, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Answer requests until SIGINT or SIGTERM, then finish those under way.

    Args:
        service: not started yet.
        listener: closed at the end.
        on_ready: called when the indexes are loaded.

    Raises:
        SpearError: a corpus or index cannot be opened, or they do not belong together.
    """
    failures: list[BaseException] = []

    def hear(failure: BaseException | None) -> None:
        if failure is None:
            spare_collections()
            on_ready()
        else:
            failures.append(failure)
            server.should_exit = True

    server = make_server(make_app(service, hear), drain_s=DRAIN_S, lifespan="on", ws="none")
    with listener, stop_on_signals(server):
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
