"""Running the service until it is told to stop."""

from __future__ import annotations

import socket

from spear_sandbox.server import RunService, make_app
from spear_sandbox.web.serving import ignore_signals_at_the_end, make_server

DRAIN_S = 30
"""Seconds that runs under way may take after a signal to stop, before they are killed."""


async def serve(service: RunService, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM, then those under way; closes the listener. On the main thread."""
    server = make_server(make_app(lambda: service), drain_s=DRAIN_S, lifespan="off", ws="none")
    with listener, ignore_signals_at_the_end():
        await server.serve(sockets=[listener])
