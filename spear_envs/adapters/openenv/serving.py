"""Running the service until it is told to stop."""

from __future__ import annotations

import socket

import uvicorn

from spear_envs.adapters.openenv.server import EnvService, make_app
from spear_sandbox.web.serving import ignore_signals_at_the_end, make_server

DRAIN_S = 10
"""Seconds that messages under way may take after a signal to stop."""


def make_service_server(service: EnvService) -> uvicorn.Server:
    """Make the server of a service.

    Raises:
        ModuleNotFoundError: the extra ``env-server`` is not installed.
    """
    return make_server(
        make_app(service),
        drain_s=DRAIN_S,
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=service.settings.message_bytes,
    )


def serve_service(server: uvicorn.Server, service: EnvService, listener: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        server: made by :func:`make_service_server`.
        service, listener: closed at the end.
    """
    with listener, ignore_signals_at_the_end():
        try:
            server.run(sockets=[listener])
        finally:
            service.close()
