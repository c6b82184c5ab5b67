"""Work on folders and in several processes that may be cut off at any moment."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from spear_envs.core.errors import SpearError

__all__ = ["hold_folder", "map_in_order"]

Job = TypeVar("Job")
Result = TypeVar("Result")


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other processes from building in it.

    Raises:
        SpearError: another process is building there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpearError(f"another process is building in {folder}: wait until it has finished.") from None
        yield
    finally:
        os.close(handle)


def map_in_order(function: Callable[[Job], Result], jobs: Iterable[Job], processes: int) -> Iterator[Result]:
    """``function`` of each job, in order; no more than a few jobs are taken before their results are.

    Args:
        function: of the top level of a module.
        jobs: taken in the calling process.
        processes: beside the calling one; 1, or a single job, does everything in the calling process.

    Raises:
        BrokenProcessPool: a process was killed.
    """
    jobs = iter(jobs)
    first = list(islice(jobs, 2))
    jobs = chain(first, jobs)
    if processes == 1 or len(first) < 2:
        yield from map(function, jobs)
        return
    # spawn: a fork would copy the locks of other threads.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent)
    waiting: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, job))
            if len(waiting) > processes + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Without this a worker would wait for ever for a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
