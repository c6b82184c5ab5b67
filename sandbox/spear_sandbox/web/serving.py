"""A server in this process, until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

__all__ = ["ignore_signals_at_the_end", "make_server"]


def make_server(app: FastAPI, *, drain_s: int, **options: Any) -> uvicorn.Server:
    """A server that says nothing of itself, loaded: a package that it misses is noticed before it is told ready.

    Args:
        app: what answers.
        drain_s: how long requests under way may take after a signal to stop.
        options: others of ``uvicorn.Config``.

    Raises:
        ModuleNotFoundError: a package for one of the options is not installed.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=drain_s, **options
    )
    config.load()
    return uvicorn.Server(config)


@contextlib.contextmanager
def ignore_signals_at_the_end() -> Iterator[None]:
    """uvicorn raises the signals that stopped it once more when it has ended; to us they are an order carried out."""
    old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
