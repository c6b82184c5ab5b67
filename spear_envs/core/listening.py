"""What every service of this package does before it answers: take an address, a token, and signals to stop."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator

from spear_envs.core.errors import SpearError

__all__ = ["bind_socket", "ignore_signals_at_the_end", "is_loopback", "read_token", "write_url"]

BACKLOG = 2048


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


def write_url(host: str, port: int) -> str:
    """The address of a service as clients take it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(variable: str) -> str | None:
    """The bearer token in a variable of the environment; None if it is empty or not set.

    Raises:
        SpearError: it has characters that no HTTP header carries.
    """
    token = os.environ.get(variable) or None
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise SpearError(f"{variable} has characters that no HTTP header carries: use letters and digits.")
    return token


@contextlib.contextmanager
def ignore_signals_at_the_end() -> Iterator[None]:
    """uvicorn raises the signals that stopped it once more when it has ended; to us they are an order carried out."""
    old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
