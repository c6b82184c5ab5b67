"""A server of the Model Context Protocol over HTTP, with the access checks of all services."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from spear_sandbox.web.answering import Gate
from spear_sandbox.web.listening import is_loopback
from spear_sandbox.web.serving import make_server, stop_on_signals

if TYPE_CHECKING:
    from mcp.server import MCPServer


DRAIN_S = 10


def serve_http(
    server: MCPServer[Any], listener: socket.socket, *, host: str, token: str | None, names: Collection[str] = ()
) -> None:
    """Serve over streamable HTTP, at ``/mcp``, until SIGINT or SIGTERM; the listener is closed at the end.

    Requests must carry the ``token``, if any. ``names`` are host names accepted without one, besides addresses and
    names without a dot.
    """
    app = Gate(server.streamable_http_app(host=host), token=token, local=is_loopback(host), hosts=names)
    served = make_server(app, drain_s=DRAIN_S, lifespan="on", ws="none")
    with listener, stop_on_signals(served):
        served.run(sockets=[listener])
