"""Running the service in this process until it is told to stop."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Iterator

import uvicorn

from spear_sandbox.server import RunService, make_app

__all__ = ["bind_socket", "serve"]

BACKLOG = 2048
KEEPALIVE_S = 75
"""Longer than clients keep an idle connection; uvicorn's 5 s would close it under the next request of some."""
DRAIN_S = 30
"""How long runs under way may take after a signal to stop; those that take longer are killed."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Args:
        port: 0 for any free one.

    Raises:
        ValueError: the port is taken or not allowed, or the host has no such address; the message names the mend.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"{host!r} is no address of this machine ({error}): give, for instance, 127.0.0.1.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reasons = {errno.EADDRINUSE: "another program listens there", errno.EACCES: "it is reserved for the system"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise ValueError(
            f"cannot listen on {host} port {port} ({reason}): choose another --port, or 0 for a free one."
        ) from None
    return listener


async def serve(service: RunService, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM; runs under way then are still answered. On the main thread.

    Args:
        listener: closed at the end.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(lambda: service),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    with listener, _ignore_signals_at_the_end():
        await server.serve(sockets=[listener])


@contextlib.contextmanager
def _ignore_signals_at_the_end() -> Iterator[None]:
    """uvicorn raises the signals that stopped it once more when it has ended; to us they are an order carried out."""
    old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
