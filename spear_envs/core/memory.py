"""How much memory is left on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def find_free_memory() -> int:
    """Bytes that the system, or the control group of this process, has left."""
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
        free = min(free, limit - used + int(files["inactive_file"]))  # files that the kernel drops when it must
    except (OSError, ValueError, KeyError):  # no control group, or "max"
        pass
    return max(free, 0)
