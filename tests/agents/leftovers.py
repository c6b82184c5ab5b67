"""What a program leaves behind on the machine: processes and shared memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 30.0


@contextmanager
def expect_nothing_left(mark: str, is_memory_ours: bool = True) -> Iterator[None]:
    """Nothing started within the block is there soon after it.

    Args:
        mark: stands in the environment of every process that belongs to the test, as the value of some variable.
        is_memory_ours: shared memory is looked at too; vLLM's own server may leave some when it is busy.
    """
    before = _list_shared_memory()
    yield
    end = time.monotonic() + PATIENCE_S
    while True:
        processes = find_processes(mark)
        # Other programs may be at work on the machine: what a living process maps is in use.
        memory = _list_shared_memory() - before - _find_mapped() if is_memory_ours else set()
        if not processes and not memory:
            return
        assert time.monotonic() < end, f"left behind: processes {processes}, shared memory {sorted(memory)}"
        time.sleep(0.5)


def find_processes(mark: str) -> dict[int, str]:
    """Command lines of the processes whose environment holds ``mark``, by their ids; zombies have none.

    Python's tracker of shared memory is not among them: it ends with the process that began it.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "resource_tracker" not in command:
                    found[int(folder.name)] = command[:120]
        except OSError:
            continue
    return found


def _list_shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _find_mapped() -> set[str]:
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        names |= {line.split("/dev/shm/", 1)[1].split()[0] for line in text.splitlines() if "/dev/shm/" in line}
    return names
