"""Uvicorn with bounds, so that slow and greedy clients do not keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)

KEEPALIVE_S = 75
"""Seconds an idle connection is kept: longer than clients do, which would else use a closed one."""
DESCRIPTORS = 65_536
"""Descriptors that a server asks for; the soft limit of most systems is 1,024."""
SPARE_DESCRIPTORS = 256
"""Descriptors kept for files, pipes and connections about to be refused."""
ACCEPTED_AT_ONCE = 32
"""Connections accepted before the first of them can be refused; asyncio would accept all that wait."""
LINGERING, LINGER_S = 64, 1.0
"""Refused connections that may still finish sending, and for how long."""
SILENCE_S = 60.0
"""Seconds between two log lines about connections that cannot be accepted."""
DRAINED = 1 << 20
"""Bytes of a chunked body that are dropped after an early answer, before the connection is closed."""
WAITING = 4096
"""Connections that the kernel queues."""
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc."""
TICKS = 5
"""Tenths of a second between two checks of the connections."""
READ_BYTES = 64 << 10
"""Bytes of an answer that a client must read within ``read_s``, or the rest of it."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What one client may use: open connections, and seconds (from its start on) and bytes of a request's headers.

    ``body_s`` is for bodies for which an application would wait for ever, ``read_s`` for reading the parts of answers.
    """

    head_s: float = 10.0
    body_s: float = 60.0
    read_s: float = 60.0
    head_bytes: int = 64 << 10
    connections: int = 4096


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, which itself bounds neither the number of connections nor the size and time of headers."""

    limits: ClassVar[ConnectionLimits]
    head_since: float | None = None
    """When the client began to send headers that are still incomplete; None if there are none."""
    body_since = 0.0
    """When the last headers were complete."""
    read_since = -math.inf
    """When the client had last read so much of an answer that its application could go on."""
    _is_refused = False
    _received = 0
    """Bytes since the last headers were complete."""
    _allowed: float = 0
    """How many of them may come: the rest of the body, and the next headers."""

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, or refuse it with 503 if there are too many."""
        super().connection_made(transport)
        self.head_since, self._allowed = time.monotonic(), self.limits.head_bytes
        if len(self.connections) > self.limits.connections:
            self._refuse("503 Service Unavailable", "this service has too many connections: try again in a moment.")
            self._is_refused = True
            if len(self.connections) > self.limits.connections + LINGERING:
                self.transport.close()
            else:  # closing now would reset the connection, and the client might never see why
                with contextlib.suppress(OSError):  # it has hung up already
                    self.transport.write_eof()
                self.head_since += LINGER_S - self.limits.head_s

    def data_received(self, data: bytes) -> None:
        """Parse data; headers that are too long end the connection with 431."""
        if self._is_refused:
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self.head_since, self.body_since, self._received = None, time.monotonic(), 0
            self._allowed = self.limits.head_bytes + _find_length(self.cycle.scope["headers"])
            return
        if self.head_since is None and (cycle is None or cycle.response_complete):
            self.head_since = time.monotonic()
        self._received += len(data)
        if self._received > self._allowed and not self.transport.is_closing():
            self._refuse("431 Request Header Fields Too Large", "the headers of this request are too long.")
            self.transport.close()

    def on_response_complete(self) -> None:
        """Drop the rest of a refused body, and wait for the next request."""
        super().on_response_complete()
        if self._allowed == math.inf:
            self._allowed = self._received + DRAINED

    def resume_writing(self) -> None:
        """Go on with an answer."""
        super().resume_writing()
        self.read_since = time.monotonic()

    def is_late(self, now: float) -> bool:
        """Return whether headers or a body take too long to arrive."""
        if self.head_since is not None:
            return now - self.head_since > self.limits.head_s
        is_waiting = self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete
        return bool(is_waiting) and now - self.body_since > self.limits.body_s

    def _refuse(self, status: str, reason: str) -> None:
        detail = f'{{"detail": "{reason}"}}'
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(detail)}\r\n"
            f"retry-after: 1\r\nconnection: close\r\n\r\n{detail}".encode()
        )


def _find_length(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """Return the bytes of the body by its headers; infinite if it is chunked: its reader bounds that."""
    found = dict(headers)
    if b"transfer-encoding" in found:
        return math.inf
    length = found.get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


class BoundedServer(uvicorn.Server):
    """uvicorn's server, which also closes connections whose requests do not arrive or whose answers are not read."""

    _complained = -math.inf

    def __init__(self, config: uvicorn.Config, read_s: float) -> None:
        super().__init__(config)
        self._read_s = read_s
        self._unread: dict[Any, tuple[int, float]] = {}
        """Bytes of answers that wait for their clients, by connection, and since when it is about so many."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. The kernel queues more connections than are accepted at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)
        asyncio.get_running_loop().set_exception_handler(self._complain)

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log uncaught errors; of connections for which there are no descriptors, only one line now and then."""
        if not context.get("message", "").startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._complained > SILENCE_S:
            self._complained = time.monotonic()
            logger.warning("connections have to wait: %s; raise the limit (ulimit -n)", context.get("exception"))

    async def on_tick(self, counter: int) -> bool:
        """Check the connections now and then."""
        if counter % TICKS == 0:
            now = time.monotonic()
            unread: dict[Any, tuple[int, float]] = {}
            for connection in list(self.server_state.connections):
                size = connection.transport.get_write_buffer_size()
                before, since = self._unread.get(connection, (0, now))
                if size > before or size <= before - READ_BYTES:
                    before, since = size, now
                if size:
                    unread[connection] = before, since
                is_late = False
                if isinstance(connection, BoundedProtocol):  # WebSockets have their own pings
                    is_late, since = connection.is_late(now), max(since, connection.read_since)
                if is_late or (size and now - since > self._read_s):
                    connection.transport.abort()
            self._unread = unread
        return await super().on_tick(counter)


def make_server(
    app: Callable[..., Any], *, drain_s: int, limits: ConnectionLimits | None = None, **options: Any
) -> uvicorn.Server:
    """Make a quiet server of an ASGI application and load it, so that a missing package is noticed at once.

    Raises the soft limit of descriptors of this process. ``drain_s`` bounds requests under way after a signal to stop,
    and ``options`` are others of ``uvicorn.Config``. Raises ModuleNotFoundError for a package that one of them needs.
    """
    limits = limits or ConnectionLimits()
    allowed = _raise_descriptors()
    most = min(limits.connections, max(allowed - SPARE_DESCRIPTORS, allowed // 4))
    bounds = {"limits": replace(limits, connections=most)}
    config = uvicorn.Config(
        app,
        http=type("Protocol", (BoundedProtocol,), bounds),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody asks for the address of a client
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=KEEPALIVE_S,
        backlog=ACCEPTED_AT_ONCE,
        **options,
    )
    config.load()
    return BoundedServer(config, limits.read_s)


def return_large_blocks() -> None:
    """Have freed blocks of a mebibyte and more returned to the system, where the allocator is glibc's.

    By itself it raises that bound to the largest block ever freed, up to 32 MiB, and then keeps what is smaller.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def _raise_descriptors() -> int:
    """Raise this process's soft limit of descriptors as far as allowed and sensible; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def stop_on_signals(server: uvicorn.Server) -> AbstractContextManager[None]:
    """Stop at SIGINT or SIGTERM, also before uvicorn listens to them; it raises them again at its end."""
    return on_signals(lambda: setattr(server, "should_exit", True))


@contextlib.contextmanager
def on_signals(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` at SIGINT and SIGTERM instead of their previous handlers."""
    old = {number: signal.signal(number, lambda *_: act()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
