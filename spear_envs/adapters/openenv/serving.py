"""Running the service in this process until it is told to stop."""

from __future__ import annotations

import socket

import uvicorn

from spear_envs.adapters.openenv.server import EnvService, make_app
from spear_envs.core.listening import ignore_signals_at_the_end

__all__ = ["make_server", "serve_service"]

DRAIN_S = 10
"""How long messages under way may take after a signal to stop."""


def make_server(service: EnvService) -> uvicorn.Server:
    """The server of a service, loaded: a package that is missing is noticed before anybody hears that it is ready.

    Raises:
        ModuleNotFoundError: the extra ``env-server`` is not installed.
    """
    config = uvicorn.Config(
        make_app(service),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=service.settings.message_bytes,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )
    config.load()
    return uvicorn.Server(config)


def serve_service(server: uvicorn.Server, service: EnvService, listener: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        server: what :func:`make_server` made of the service.
        service: closed at the end.
        listener: likewise.
    """
    with listener, ignore_signals_at_the_end():
        try:
            server.run(sockets=[listener])
        finally:
            service.close()
