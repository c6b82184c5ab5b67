"""What all services share in listening: sockets, tokens, and telling strangers apart."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from spear_sandbox.errors import SpearError, hide_secret

BACKLOG = 2048


def bind_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a listening TCP socket; port 0 takes any free one.

    With ``shared`` other shared sockets of this user may listen there, and the kernel distributes the connections.
    Raises SpearError if the port is taken or not allowed, or the host has no such address.
    """
    if not 0 <= port < 1 << 16:
        raise SpearError(f"port {port}: give a number from 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SpearError(f"{host!r} is not an address of this machine ({error}).") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reasons = {errno.EADDRINUSE: "another program listens there", errno.EACCES: "it is reserved for the system"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise SpearError(f"cannot listen on {host} port {port} ({reason}): choose another --port.") from None
    return listener


def _read_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    address = _read_address(host)
    return host == "localhost" if address is None else address.is_loopback


def find_stranger(headers: Mapping[str, str], local: bool) -> str | None:
    """Say why a request comes from a stranger, by its headers in lower case; None if it does not.

    A browser lets every page talk to this machine: as another site, which the headers show, or under a host name that
    its owner has pointed here. ``local``: the service listens on the loopback interface.
    """
    return _find_stranger(headers.get("origin"), headers.get("host", ""), local)


@lru_cache(maxsize=256)
def _find_stranger(origin: str | None, named: str, local: bool) -> str | None:
    try:
        host = urlsplit(f"//{named}")
        foreign = origin is not None and urlsplit(origin).netloc != host.netloc
        here = is_loopback(host.hostname or "")
    except ValueError:  # brackets without an address
        foreign = here = False
    if foreign:
        return "pages of other sites may not use this service."
    if local and not here:
        return "this service is for this machine alone: ask it under 127.0.0.1 or localhost, or start it with --host."
    return None


def find_foreign_name(headers: Mapping[str, str], allowed: Collection[str]) -> str | None:
    """Say why the host name of a request may be a stranger's; None if it cannot be, as ``allowed`` ones in lower case.

    Without a token a service that runs code must know its names: the owner of another name can point it here, and pages
    under that name would then be same-origin. Addresses and names without a dot are safe.
    """
    named = headers.get("host", "")
    try:
        name = (urlsplit(f"//{named}").hostname or "").rstrip(".")
    except ValueError:  # brackets without an address
        name = ""
    if name in allowed or (name and "." not in name) or _read_address(name) is not None:
        return None
    return f"this service is not known as {named[:80]!a}: name it with --allowed-host, or set a token."


def write_url(host: str, port: int) -> str:
    """Write the base URL of a service."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(variable: str) -> str | None:
    """Read the bearer token from an environment variable; None if it is empty or not set.

    Or from the file in ``<variable>_FILE``, as orchestrators mount secrets; a trailing line end is dropped. Raises
    SpearError if it has characters that an HTTP header cannot carry, or the file cannot be read or is empty.
    """
    token = os.environ.get(variable) or None
    if token is None and (path := os.environ.get(f"{variable}_FILE")):
        try:
            token = Path(path).read_text("utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SpearError(f"{variable}_FILE: {path} cannot be read ({error}): name a file with the token.") from None
        if not token:
            raise SpearError(f"{variable}_FILE: {path} is empty: write the token into it.")
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise SpearError(f"{variable} has characters that an HTTP header cannot carry: use letters and digits.")
    if token is not None:
        hide_secret(token, variable)
    return token


LARGE = 64 << 10
"""Bytes or characters from which work is done beside the event loop."""
_aside = ThreadPoolExecutor(1, "large-work")
"""One thread: several would take turns with each other before the event loop gets one."""
Result = TypeVar("Result")


async def work_aside(size: int, work: Callable[[], Result]) -> Result:
    """Do this at once, or in a thread if it handles many bytes or characters."""
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_aside, work)
