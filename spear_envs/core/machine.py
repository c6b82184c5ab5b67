"""This machine: memory, users' Python beside ours, and processes that no file of the current folder can break."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def find_free_memory() -> int:
    """Return the free bytes of the system, or of the control group of this process."""
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


def trim_heap() -> None:
    """Give back what malloc keeps of freed memory, where it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


HERE_LAST = "import sys; sys.path[0] or sys.path.append(sys.path.pop(0))"
"""Code for ``python -c`` after which the current folder is searched last."""


@contextmanager
def _outlive() -> Iterator[None]:
    """Turn the end of a script that is imported into an error: our command would end as if all were well."""
    try:
        yield
    except SystemExit as error:
        raise ImportError(f"it ends the program ({error!r}): put that below if __name__ == '__main__'").with_traceback(
            error.__traceback__
        ) from None


def import_module(name: str) -> ModuleType:
    """Import a module of the user's. Raises what the module raises, and ImportError if it ends the program."""
    with _outlive():
        return importlib.import_module(name)


def import_file(path: Path, name: str) -> ModuleType:
    """Import a file as the module ``name``, which can import modules next to it. Raises as :func:`import_module`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # as an import does: dataclasses and pickle look it up
    try:
        with _outlive():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def make_command(module: str, *arguments: str, path: Sequence[str] | None = None) -> list[str]:
    """Make the command that runs a module in another process, like ``python -m`` but with the current folder last.

    ``-m`` puts that folder first, where a user's ``datasets.py`` or ``random.py`` takes the place of the real one.
    ``path`` is where the process imports from instead, such as ``sys.path`` of this one.
    """
    order = HERE_LAST
    if path is not None:
        order = f"import sys; sys.path[:] = {[folder or os.getcwd() for folder in path]!r}"
    start = f"{order}; import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", start, *arguments]
