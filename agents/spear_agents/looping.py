"""Coroutines called from synchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, also in a thread with a running loop, as in a notebook. Ctrl-C cancels it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: Future[Result] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Result]]] = Future()

    async def run() -> Result:
        task = asyncio.ensure_future(work)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def play() -> None:
        try:
            result.set_result(asyncio.run(run()))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=play, name="spear-agents", daemon=True)
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
