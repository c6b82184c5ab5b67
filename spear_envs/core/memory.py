"""The free memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def find_free_memory() -> int:
    """Bytes free on the system, or in the control group of this process."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit, used = (
            int(Path("/sys/fs/cgroup", name).read_text("ascii")) for name in ("memory.max", "memory.current")
        )
        files = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text("ascii").splitlines())
        free = min(free, limit - used + int(files["inactive_file"]))  # caches that the kernel can drop
    except (OSError, ValueError, KeyError):  # no control group, or "max"
        pass
    return max(free, 0)
