"""Rehearses a run in the warm interpreter, so that forks find its work done.

The first calls of a function write to memory: Python counts them, rewrites the instructions and caches lookups of
names, and the linker resolves C functions. After a fork each of these writes copies a page.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as the supervisor
import os
import sys

from spear_sandbox.guest import kernel
from spear_sandbox.guest.entry import flush, play
from spear_sandbox.guest.job import Job, pack_job, pack_record, read_job
from spear_sandbox.guest.program import MAIN, write_files
from spear_sandbox.guest.supervisor import hold_in_sockets, supervise

_TIMES = 20
"""Rehearsals: Python 3.11 rewrites a function after eight calls and settles a few calls later."""
_JOB: Job = {
    "code": "for i in range(2):\n    print(i + 1)\n",
    "files": {},
    "fetch_files": [],
    "wall_s": 60.0,
    "memory_mb": 1024,
    "processes": 1,
    "descriptors": 64,
    "file_mb": 1,
    "disk_mb": 1,
    "inodes": 64,
    "groups": 0,
    "session": False,
}


def rehearse(folder: str) -> None:
    """Read a job, write its files, run it, watch a child and report, several times.

    Only what leaves this process and the folder unchanged: no mounts, users or limits. Its output must be discarded.
    """
    for _ in range(_TIMES):
        fd = os.memfd_create("job", os.MFD_CLOEXEC)
        os.write(fd, pack_job(_JOB))
        job = read_job(fd)
        write_files(job, folder)
        play(job["code"], MAIN, {"__builtins__": sys.modules["builtins"]})
        flush(sys.stdout)
        flush(sys.stderr)
        child = kernel.fork()
        if child == 0:
            os._exit(0)
        pack_record(supervise(child, job, folder, lambda: iter(()), lambda: None, elsewhere=hold_in_sockets))
    # The supervisor has blocked it for its own process.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGCHLD})
    os.unlink(os.path.join(folder, MAIN))
