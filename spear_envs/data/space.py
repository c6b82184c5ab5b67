"""Checking disk space before it is needed."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spear_envs.core.errors import SpearError


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_space(folder: Path, needed: int, name: str) -> None:
    """Check that ``folder`` has ``needed`` bytes left.

    Raises:
        SpearError: it has fewer; the message is about ``name``.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SpearError(
            f"{name} needs {format_bytes(needed)}, and {folder} has {format_bytes(free)} left: free the disk, "
            "or name a folder on another one with SPEAR_DATA."
        )


@contextmanager
def explain_full_disk(folder: Path, name: str) -> Iterator[None]:
    """Say what to do if the disk of ``folder`` fills up before ``name`` is complete.

    Raises:
        SpearError: it does.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SpearError(
            f"the disk of {folder} is full before {name} is complete: free it, or name a folder on another one with "
            "SPEAR_DATA. The same command then resumes."
        ) from error
