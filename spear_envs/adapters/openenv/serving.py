"""Running the service in this process until it is told to stop."""

from __future__ import annotations

import socket

import uvicorn

from spear_envs.adapters.openenv.server import EnvService, make_app
from spear_envs.core.listening import ignore_signals_at_the_end

__all__ = ["serve_service"]

DRAIN_S = 10
"""How long messages under way may take after a signal to stop."""


def serve_service(service: EnvService, listener: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        service: closed at the end.
        listener: likewise.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(service),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="websockets-sansio",
            ws_max_size=service.settings.message_bytes,
            server_header=False,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    with listener, ignore_signals_at_the_end():
        try:
            server.run(sockets=[listener])
        finally:
            service.close()
