"""Running the service in this process until it is told to stop."""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.server import RetrievalService, make_app

__all__ = ["bind_socket", "is_loopback", "serve", "spare_collections"]

BACKLOG = 2048
DRAIN_S = 10
"""How long requests under way may take after a signal to stop."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Args:
        port: 0 for any free one.

    Raises:
        SpearError: the port is taken or not allowed, or the host has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SpearError(f"{host!r} is no address of this machine ({error}): give, for instance, 127.0.0.1.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reasons = {errno.EADDRINUSE: "another program listens there", errno.EACCES: "it is reserved for the system"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise SpearError(
            f"cannot listen on {host} port {port} ({reason}): choose another --port, or 0 for a free one."
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def spare_collections() -> None:
    """Keep what is loaded out of garbage collections: each full one would stop all callers for tens of milliseconds."""
    gc.collect()
    gc.freeze()


def serve(service: RetrievalService, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Answer requests until SIGINT or SIGTERM; those under way then are still answered.

    Args:
        service: not started yet.
        listener: closed at the end.
        on_ready: called when corpus and index are loaded.

    Raises:
        SpearError: corpus or index cannot be opened, or do not belong together.
    """
    failures: list[BaseException] = []

    def hear(failure: BaseException | None) -> None:
        if failure is None:
            spare_collections()
            on_ready()
        else:
            failures.append(failure)
            server.should_exit = True

    server = uvicorn.Server(
        uvicorn.Config(
            make_app(service, hear),
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    with listener, _ignore_signals_at_the_end():
        server.run(sockets=[listener])
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _ignore_signals_at_the_end() -> Iterator[None]:
    """uvicorn raises the signals that stopped it once more when it has ended; to us they are an order carried out."""
    old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
