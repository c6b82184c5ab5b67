"""One event loop and one pool of connections per process, shared by its threads and loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from spear_envs.core.errors import SpearError
from spear_sandbox.web.replies import bound_answers

if TYPE_CHECKING:
    import httpx


Result = TypeVar("Result")

MAX_CONNECTIONS = 256
KEPT_CONNECTIONS = 64
KEEPALIVE_S = 4.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one."""


class HttpSession:
    """An event loop on its own thread, and an HTTP client on that loop."""

    def __init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SpearError(
                "asking a retrieval service needs httpx: pip install 'spear-envs[search]' brings it."
            ) from error
        limits = httpx.Limits(
            max_connections=MAX_CONNECTIONS, max_keepalive_connections=KEPT_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
        )
        self.client: httpx.AsyncClient = httpx.AsyncClient(
            limits=limits,
            follow_redirects=False,
            headers={"User-Agent": "spear-envs"},
            # A proxy from the environment would be asked for 127.0.0.1, too.
            trust_env=False,
        )
        bound_answers(self.client)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="retrieval-client", daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the session's loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)


_lock = threading.Lock()
_session: HttpSession | None = None
_of_parents: list[HttpSession] = []
"""Sessions of the parents, kept in forked children so that none is finalised there."""


def share_session() -> HttpSession:
    """Return the session of this process, made at the first call and again in a forked child, which lacks its thread.

    Raises:
        SpearError: httpx is not installed.
    """
    global _session
    with _lock:
        if _session is None:
            _session = HttpSession()
        return _session


def _forget_session() -> None:
    """In a forked child the thread is gone, the sockets are the parent's, and the lock may never be released."""
    global _lock, _session
    _lock = threading.Lock()
    if _session is not None:
        _of_parents.append(_session)
    _session = None


with contextlib.suppress(AttributeError):  # not on platforms without fork
    os.register_at_fork(after_in_child=_forget_session)
