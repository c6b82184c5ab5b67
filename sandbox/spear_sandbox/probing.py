"""The program of the self-test. It runs inside the sandbox, imports nothing of it, and prints what it found."""

import contextlib
import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

CALLS = {
    "x86_64": {"unshare": 272, "mount": 165, "ptrace": 101, "io_uring_setup": 425},
    "aarch64": {"unshare": 97, "mount": 40, "ptrace": 117, "io_uring_setup": 425},
}
HELD_S = 30
"""How long a process sleeps that the sandbox should end, or should not have let start."""


def try_to(action: Callable[[], Any]) -> Any:
    """Return what ``action`` does, or None if the system refuses."""
    try:
        return action()
    except (OSError, ValueError):
        return None


def look_around(canaries: dict[str, Any]) -> dict[str, Any]:
    """Collect what one run can find out about its surroundings."""
    found: dict[str, Any] = {}

    def read() -> str:
        with open(canaries["file"]) as file:
            return file.read()

    def write() -> int:
        with open(canaries["file"], "w") as file:
            return file.write("changed")

    def connect(family: int, address: Any) -> str:
        with socket.socket(family) as line:
            line.settimeout(1)
            line.connect(address)
            return "connected"

    found["arithmetic"], found["uid"] = 6 * 7, os.getuid()
    found["read"], found["wrote"] = try_to(read), try_to(write)
    found["loopback"] = try_to(lambda: connect(socket.AF_INET, ("127.0.0.1", canaries["port"])))
    found["abstract"] = try_to(lambda: connect(socket.AF_UNIX, "\0" + canaries["abstract"]))
    # A real signal: in a pid namespace the id may be that of a process of this run.
    try_to(lambda: os.kill(canaries["victim"], 9))
    found["names"] = [token for token in canaries["tokens"] if token in list_commands()]
    with open("/dev/null"), contextlib.suppress(OSError), open("/proc/self/status") as file:
        fields = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
        wanted = ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")
        found["status"] = {name: int(fields[name], 16) for name in wanted if name in fields}
    # prctl says the same if /proc cannot be read.
    found["no_new_privileges"] = ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)
    found["seccomp"] = ctypes.CDLL(None).prctl(21, 0, 0, 0, 0)
    found["calls"] = try_calls()
    found["descriptors"] = [number for number in range(256) if try_to(partial(os.fstat, number))]
    found["environment"] = [name for name in os.environ if name in canaries["environment"]]
    return found


def list_commands() -> str:
    """Return the command lines of all visible processes."""
    lines = []
    for name in try_to(lambda: os.listdir("/proc")) or ():
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                lines.append(file.read().decode("utf-8", "replace"))
    return "\n".join(lines)


def try_calls() -> list[str]:
    """List the system calls that were not refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = CALLS[os.uname().machine]
    attempts = {
        "unshare": (numbers["unshare"], 0x10000000),
        "mount": (numbers["mount"], b"none", b"/tmp", b"tmpfs", 0, None),
        "ptrace": (numbers["ptrace"], 0, 0, 0, 0),
        "io_uring": (numbers["io_uring_setup"], 1, ctypes.create_string_buffer(120)),
    }
    return [name for name, arguments in attempts.items() if libc.syscall(*arguments) >= 0]


def try_forks(most: int) -> int:
    """Count how many processes there can be at once."""
    children: list[int] = []
    try:
        while len(children) < most:
            child = os.fork()
            if child == 0:
                time.sleep(HELD_S)
                os._exit(0)
            children.append(child)
    except OSError:
        pass
    return len(children)


def leave_orphan(token: str) -> str:
    """Leave an orphaned process named ``token``."""
    named, name = os.pipe()
    if os.fork() == 0:
        # The weak level refuses it: it finds processes by their parents.
        try_to(os.setsid)
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, token.encode(), 0, 0, 0)
            os.write(name, b"x")
            time.sleep(HELD_S)
        os._exit(0)
    os.close(name)
    os.wait()
    return "left" if os.read(named, 1) else "no orphan"


def hold_memory(mib: int) -> int | None:
    """Try to allocate so much memory in one process; return the MiB, or None if it is refused."""
    try:
        return len(bytearray(mib << 20)) >> 20
    except MemoryError:
        return None


def share_out_memory(mib: int, children: int) -> str:
    """Have several processes hold this much each."""
    for _ in range(children):
        if os.fork() == 0:
            # All at once and touched page by page: a copy would exceed the limit of one process, and end it.
            held = bytearray(mib << 20)
            held[::4096] = b"x" * (mib << 8)
            time.sleep(HELD_S)
            os._exit(0)
    time.sleep(HELD_S)
    return "held"


def write_much(mib: int) -> int:
    """Count how many MiB of a file can be written."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with open("much", "wb", buffering=0) as file:
            for _ in range(mib):
                file.write(bytes(1 << 20))
    except OSError:
        pass
    return os.path.getsize("much") >> 20


def main() -> None:
    """Do what standard input asks for."""
    name, arguments = json.load(sys.stdin)
    sys.stdout.write(json.dumps(globals()[name](*arguments)) + "\n")


if __name__ == "__main__":
    main()
