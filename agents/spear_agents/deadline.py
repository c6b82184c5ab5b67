"""A limit on the time that somebody else's Python takes in this thread, such as a chat template that loops."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK_EVERY_S = 0.25
_lock = threading.Lock()
_due: dict[int, float] = {}
"""When the time of a thread is up."""
_pending = threading.Event()
_watched_by = -1
"""The process whose thread watches: a forked child has none."""


class _LateError(BaseException):
    """Not an Exception, which the code in question may catch."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when its time is up; code in C is interrupted only when it returns to Python."""
    global _watched_by
    thread = threading.get_ident()
    with _lock:
        if _watched_by != os.getpid():
            _watched_by = os.getpid()
            _due.clear()
            threading.Thread(target=_watch, name="deadlines", daemon=True).start()
        _due[thread] = time.monotonic() + seconds
        _pending.set()
    try:
        try:
            yield
        finally:
            with _lock:
                is_late = _due.pop(thread, None) is None
        while is_late:  # the error is on its way
            time.sleep(0.001)
    except _LateError:
        raise TimeoutError(f"it took more than {seconds:g} s") from None


def _watch() -> None:
    while _pending.wait():
        time.sleep(_LOOK_EVERY_S)
        with _lock:
            now = time.monotonic()
            for thread in [thread for thread, due in _due.items() if due < now]:
                del _due[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_LateError))
            if not _due:
                _pending.clear()
