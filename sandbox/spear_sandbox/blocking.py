"""Executors for code that is not asynchronous: one event loop per process, on its own thread."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

from spear_sandbox.protocol import Executor, FaultKind, Limits, Outcome, SandboxFault

_all: weakref.WeakSet[BlockingExecutor] = weakref.WeakSet()
_CLOSE_S = 10
_LAST_S = 1.0
"""How long runs may take to end by themselves once their executor is closed."""
_of_parents: list[object] = []
"""Kept in forked children, so that nothing is finalised that belongs to the parent."""


class BlockingExecutor:
    """A blocking :class:`~spear_sandbox.protocol.Executor`.

    Any number of threads may call :meth:`run` at once. The executor is made at the first run, on its own loop, and
    again in a forked child; it is closed when the process ends.
    """

    def __init__(self, make_executor: Callable[[], Executor]) -> None:
        self._make = make_executor
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._executor: Executor | None = None
        self._closed = False
        _all.add(self)

    def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        """Run and wait; see :meth:`spear_sandbox.protocol.Executor.run` for arguments and errors."""

        async def carry_out() -> Outcome:
            if self._executor is None:
                self._executor = self._make()
            return await self._executor.run(code, stdin=stdin, files=files, fetch_files=fetch_files, limits=limits)

        work = carry_out()
        try:
            # Whatever is handed over before close() takes the lock is on the loop before what ends it.
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(work, self._start())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        except BaseException:
            # An interrupted thread ends its run.
            future.cancel()
            raise

    def close(self) -> None:
        """Close the executor and end the thread; a later :meth:`run` raises a ``SandboxFault``."""
        with self._lock:
            self._closed = True
            loop, thread, owner = self._loop, self._thread, self._owner
            self._loop = None
        if loop is None or thread is None or owner != os.getpid():
            return

        async def end() -> None:
            try:
                if self._executor is not None:
                    await asyncio.wait_for(self._executor.close(), _CLOSE_S)
            finally:
                # Runs that wait for another try would keep their callers for ever once the loop has stopped.
                if left := asyncio.all_tasks() - {asyncio.current_task()}:
                    _, left = await asyncio.wait(left, timeout=_LAST_S)
                for task in left:
                    task.cancel()
                if left:
                    await asyncio.wait(left, timeout=_LAST_S)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=_CLOSE_S + 3 * _LAST_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        atexit.unregister(self.close)

    def _forget(self) -> None:
        """Start anew in a forked child: thread and executor are the parent's, and the lock may never be released."""
        if self._executor is not None:
            _of_parents.append((self._executor, self._loop))
        self._lock = threading.Lock()
        self._loop, self._thread, self._executor = None, None, None
        self._owner = os.getpid()

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise _closed()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        return self._loop


def _closed() -> SandboxFault:
    return SandboxFault(FaultKind.UNAVAILABLE, "the sandbox is closed")


_lock = threading.Lock()
_shared: dict[str | None, BlockingExecutor] = {}


def open_executor(url: str | None = None) -> BlockingExecutor:
    """Return this process's executor for a service or, without ``url``, a private pool; it starts at the first run."""

    def make() -> Executor:
        if url is None:
            from spear_sandbox.pool.local import LocalExecutor

            return LocalExecutor()
        from spear_sandbox.client import HttpExecutor

        return HttpExecutor([url])

    with _lock:
        if url not in _shared:
            _shared[url] = BlockingExecutor(make)
        return _shared[url]


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    for executor in list(_all):
        executor._forget()


with contextlib.suppress(AttributeError):  # not on platforms without fork
    os.register_at_fork(after_in_child=_forget_all)
