"""Shared memory of processes that may be killed, which then leave it behind for others to remove."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MAPPED = re.compile(r"/dev/shm/psm_\w+")


def find_shared_memory(processes: Iterable[int]) -> list[Path]:
    """The files of Python's shared memory that ``processes`` have open; none where the system has no ``/proc``.

    While they run, since nothing tells afterwards.
    """
    found = set()
    for number in processes:
        with suppress(OSError):
            found |= set(_MAPPED.findall(Path(f"/proc/{number}/maps").read_text(encoding="utf-8")))
    return sorted(map(Path, found))


def find_semaphores(processes: Iterable[int]) -> list[Path]:
    """Those that joblib made in processes that have ended; their names tell which."""
    return [file for number in processes for file in Path("/dev/shm").glob(f"sem.loky-{number}-*")]
