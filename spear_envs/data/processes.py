"""Interruptible work on folders and in several processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from spear_envs.core.errors import SpearError
from spear_envs.data.files import hold_lock, put_folder

Job = TypeVar("Job")
Result = TypeVar("Result")


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other processes from building in it.

    Raises:
        SpearError: another process is building there.
    """

    def refuse() -> None:
        raise SpearError(f"another process is building in {folder}: wait until it has finished.") from None

    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder, refuse):
        yield


def replace_folder(fresh: Path, folder: Path, work: Path) -> None:
    """Replace ``folder``, if it exists, with ``fresh``; its old content stays in ``work``."""
    replaced = work / "replaced"
    shutil.rmtree(replaced, ignore_errors=True)  # of an interrupted build
    if folder.exists():
        folder.rename(replaced)
    put_folder(fresh, folder)


@contextmanager
def explain_build(built: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Say what to do if a resumable build fails.

    Args:
        built: what is built and where, as in ``the store /data/shop``.

    Raises:
        SpearError: a process was killed, or one of ``errors`` was raised.
    """
    again = "fix that and run the same command again, which resumes."
    try:
        yield
    except BrokenProcessPool as error:
        raise SpearError(
            f"a process that built {built} ended (killed for want of memory? a script without `if __name__ == "
            f'"__main__":`?): {again}'
        ) from error
    except errors as error:
        raise SpearError(f"{built} could not be built ({error}): {again}") from error


def map_in_order(function: Callable[[Job], Result], jobs: Iterable[Job], processes: int) -> Iterator[Result]:
    """Yield ``function`` of each job in order; only a few jobs are taken in advance.

    Args:
        function: of the top level of a module.
        jobs: taken in the calling process.
        processes: besides the calling one; 1, or a single job, does everything in the calling process.

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
    """End with a killed parent, for which workers would otherwise wait."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
