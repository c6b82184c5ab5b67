"""The process that runs the program: its limits, its files, and an empty frame."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions make enums of all that they take and give
import _sitebuiltins
import builtins
import gc
import io
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

from spear_sandbox.guest import kernel
from spear_sandbox.guest.entry import execute
from spear_sandbox.guest.job import Job

WORKING_FOLDER = "/tmp"
MAIN = "main.py"
_MIB = 1 << 20
_NICE = 5
_STACK = 8 * _MIB
_PENDING_SIGNALS = 128


def write_files(job: Job, folder: str) -> None:
    """Write the program and its files below ``folder``. Their names were checked by the pool.

    A file that has the program's name takes its place: the program is run from the job.
    """
    for name, content in {MAIN: job["code"].encode("utf-8", "surrogatepass"), **job["files"]}.items():
        path = os.path.join(folder, name)
        if "/" in name:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)


def set_limits(job: Job, baseline: int) -> None:
    """Limit this process and its children; ``baseline`` is the address space of the bare interpreter in bytes."""
    # All threads of a process count together.
    seconds = int(job["wall_s"] * len(os.sched_getaffinity(0))) + 1
    memory = baseline + job["memory_mb"] * _MIB
    for which, bound in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, job["file_mb"] * _MIB),
        (resource.RLIMIT_NOFILE, job["descriptors"]),
        (resource.RLIMIT_STACK, _STACK),
        (resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _lower(which, bound, bound)
    # A program may catch SIGXCPU at the soft limit, but not SIGKILL at the hard one.
    _lower(resource.RLIMIT_CPU, seconds, seconds + 1)
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))  # a lower one needs a privilege


def _lower(which: int, soft: int, hard: int) -> None:
    highest = resource.getrlimit(which)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


def measure_address_space() -> int:
    """Return the bytes of address space of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def make_streams() -> None:
    """Give the interpreter new streams over descriptors 0 to 2, which are already of the kind that programs get."""
    # As the interpreter does: closing one leaves its descriptor open, and line ends are read as they are.
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape", "\n")
    stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogateescape", "\n")
    error = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    stderr = io.TextIOWrapper(error, "utf-8", "backslashreplace", "\n", line_buffering=True, write_through=True)
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = stdin, stdout, stderr  # type: ignore[misc]


def hide_own_modules() -> None:
    """Hide our modules from programs. They stay in memory, since freeing them would cost time in each run."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "spear_sandbox"]:
        kernel.keep_for_ever(sys.modules.pop(name))


def hand_over(job: Job, folder: str) -> Callable[[], None]:
    """Make this interpreter look freshly started; return what runs the program and ends the process.

    The caller has made the streams and hidden our modules. It returns to the bottom of its stack before the call, so
    the program finds no frames of ours.
    """
    kernel.close_from(3)
    if not job["session"]:  # which can be interrupted only while a cell runs
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _reseed()
    path = os.path.join(folder, MAIN)
    sys.argv = [path]
    sys.orig_argv = [sys.executable, path]
    sys.path[0] = folder  # instead of the folder of these modules
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=sys.modules["builtins"], __cached__=None)
    former = sys.modules["__main__"]
    sys.modules["__main__"] = main
    former.__dict__.clear()
    # As site, which was not imported, does.
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    gc.enable()
    held = [main]
    return lambda: execute(job["code"], path, held)


def _reseed() -> None:
    """Reseed every stream of random numbers that was seeded before the fork."""
    streams: list[Any] = [sys.modules[name] for name in ("random", "numpy.random") if name in sys.modules]
    if "sympy.core.random" in sys.modules:
        streams.append(sys.modules["sympy.core.random"].rng)
    for stream in streams:
        stream.seed()
