"""Shared memory of killed processes, for others to remove."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MAPPED = re.compile(r"/dev/shm/psm_\w+")


def find_shared_memory(processes: Iterable[int]) -> list[Path]:
    """The files of Python's shared memory that running ``processes`` have open; empty without ``/proc``."""
    found = set()
    for number in processes:
        with suppress(OSError):
            found |= set(_MAPPED.findall(Path(f"/proc/{number}/maps").read_text(encoding="utf-8")))
    return sorted(map(Path, found))


def find_semaphores(processes: Iterable[int]) -> list[Path]:
    """Semaphores of joblib from ended processes, found by name."""
    return [file for number in processes for file in Path("/dev/shm").glob(f"sem.loky-{number}-*")]
