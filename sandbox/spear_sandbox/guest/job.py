"""Input and output of a run, as bytes that both sides of the isolation read."""

from __future__ import annotations

import marshal
import os
import struct
from typing import NamedTuple, TypedDict


class Job(TypedDict):
    """One program and its limits; the fields are those of ``spear_sandbox.protocol.Limits``."""

    code: str
    files: dict[str, bytes]
    fetch_files: list[str]
    wall_s: float
    memory_mb: int
    processes: int
    descriptors: int
    file_mb: int
    disk_mb: int
    inodes: int
    groups: int
    """Number of descriptors of control groups after the report."""
    session: bool
    """Whether a descriptor for a session's orders follows."""


def pack_job(job: Job) -> bytes:
    """Return the bytes for :func:`read_job`. Lone surrogates survive."""
    return marshal.dumps(dict(job))


def read_job(fd: int) -> Job:
    """Return the job in an anonymous file; closes it. The writer is the pool, never a guest."""
    size = os.lseek(fd, 0, os.SEEK_END)
    data = os.pread(fd, size, 0)
    while len(data) < size:  # one call gives at most 2 GiB
        data += os.pread(fd, size, len(data))
    os.close(fd)
    job: Job = marshal.loads(data)
    return job


class Verdict:
    """Why a run ended, as one byte."""

    ITSELF, TIMEOUT, MEMORY, NOT_STARTED, STARVED = range(5)
    """STARVED: not started either, for lack of memory."""


class Record(NamedTuple):
    """What the supervisor of a run reports at its end."""

    verdict: int
    wait_status: int
    cpu_s: float
    wall_s: float
    peak_rss_kb: int
    files: dict[str, bytes]
    """Fetched files; for a run that was not started, the error under the empty name."""


_HEAD = struct.Struct("<BiddQI")
_FILE = struct.Struct("<II")


def pack_record(record: Record) -> bytes:
    """Return the bytes for :func:`unpack_record`."""
    head = (record.verdict, record.wait_status, record.cpu_s, record.wall_s, record.peak_rss_kb, len(record.files))
    parts = [_HEAD.pack(*head)]
    for name, content in record.files.items():
        key = name.encode("utf-8", "surrogatepass")
        parts += [_FILE.pack(len(key), len(content)), key, content]
    return b"".join(parts)


def unpack_record(data: bytes) -> Record | None:
    """Return the first record in these bytes, or None if it is incomplete."""
    try:
        verdict, wait_status, cpu_s, wall_s, peak_rss_kb, count = _HEAD.unpack_from(data)
        place, files = _HEAD.size, {}
        for _ in range(count):
            key, size = _FILE.unpack_from(data, place)
            place += _FILE.size
            name = data[place : place + key].decode("utf-8", "surrogatepass")
            place += key
            files[name] = data[place : place + size]
            place += size
    except (struct.error, UnicodeDecodeError):
        return None
    # Slices beyond the end are short, not an error, so that only the last place tells.
    if place > len(data):
        return None
    return Record(verdict, wait_status, cpu_s, wall_s, peak_rss_kb, files)
