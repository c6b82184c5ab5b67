"""Calls of the Linux kernel that the standard library does not offer: namespaces, mounts, capabilities, Landlock."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

MACHINE = os.uname().machine
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91},
}.get(MACHINE, {})
# The same on all machines.
_CLOSE_RANGE, _MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 436, 442, 444, 445, 446

NEW_MOUNTS, NEW_CONTROL_GROUPS = 0x0002_0000, 0x0200_0000
_NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000
ALL_NAMESPACES = NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_USER | _NEW_PID | _NEW_NET
_CLONE_PIDFD = 0x1000
_SIGCHLD = 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 2, 4
CAP_SETUID = 7
_HIGHEST_CAPABILITY = 63
_ARENA_MAX = -8
_MADV_COLLAPSE, _HUGE = 25, 2 << 20

# PyDLL keeps the interpreter's lock through the call: the child of clone() must own it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_drop = _libc["prctl"]  # a second handle: one operation of prctl takes two arguments
_drop.argtypes = (ctypes.c_int, ctypes.c_ulong)
_libc.kill.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.signalfd.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int)
_libc.mount.argtypes = (*(ctypes.c_char_p,) * 3, ctypes.c_ulong, ctypes.c_char_p)
_CHILD_SIGNALS = (1 << (_SIGCHLD - 1)).to_bytes(128, "little")


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(number: int, what: str, *arguments: object) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *values), what)


def _prctl(operation: int, first: int = 0, second: int = 0) -> int:
    return int(_libc.prctl(operation, first, second, 0, 0))


def clone(flags: int) -> tuple[int, int]:
    """Fork into new namespaces; return the process id and a pidfd in the parent, ``(0, -1)`` in the child."""
    pidfd = ctypes.c_int(-1)
    # Without a stack of its own the child continues on a copy of this one, as after fork.
    child = _call(_NUMBERS["clone"], "clone", flags | _CLONE_PIDFD | _SIGCHLD, 0, ctypes.byref(pidfd), 0, 0)
    return child, pidfd.value


def fork() -> int:
    """Fork without Python's own work in the child, which touches pages all over the memory.

    For a process with one thread. The child must seed its streams of random numbers itself.
    """
    return _check(_libc.fork(), "fork")


def kill_all(number: int) -> None:
    """Signal everything in this pid namespace except its first process, which is this one."""
    _libc.kill(-1, number)


def unshare(flags: int) -> None:
    """Leave the namespaces of the parent."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(*texts[:3], flags, texts[3])
    _check(result, f"mount {kind or source} on {target}")


def make_mounts_private() -> None:
    """Keep mounts of this namespace from appearing in the parent's."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def bind(source: str, target: str, *, read_only: bool = True, devices: bool = False) -> None:
    """Show ``source``, and what is mounted below it, at ``target`` as well; set-user-id bits have no effect there."""
    # The kernel ignores further flags of a bind mount, and a remount changes the upper one alone.
    mount(source, target, None, MS_BIND | _MS_REC)
    flags = MS_NOSUID | (MS_RDONLY if read_only else 0) | (0 if devices else MS_NODEV)
    attributes = _MountAttributes(flags, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    path = ctypes.c_char_p(os.fsencode(target))
    _call(_MOUNT_SETATTR, f"mount_setattr {target}", -100, path, _AT_RECURSIVE, ctypes.byref(attributes), size)


def enter_root(folder: str) -> None:
    """Make ``folder``, a mount, the root, read-only, and let go of the old one."""
    os.chdir(folder)
    # With one folder for both, the old root is stacked on the new one and needs no place of its own.
    here = ctypes.c_char_p(b".")
    _call(_NUMBERS["pivot_root"], "pivot_root", here, here)
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount of the old root")
    os.chdir("/")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def write_file(path: str, text: str) -> None:
    """Write to a file that must exist."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def enter_groups(entrances: Sequence[int]) -> None:
    """Put this process into the control groups whose ``cgroup.procs`` are open, and close them."""
    for fd in entrances:
        os.write(fd, b"0")
        os.close(fd)


def die_first(score: int) -> None:
    """Have the kernel kill this process and its children for memory before those of a lower score (up to 1000)."""
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
    if int(os.read(fd, 16)) < score:
        os.write(fd, b"%d" % score)
    os.close(fd)


def open_child_signals() -> int:
    """Open a descriptor that can be read when SIGCHLD, which must be blocked, is pending."""
    return _check(_libc.signalfd(-1, _CHILD_SIGNALS, os.O_CLOEXEC | os.O_NONBLOCK), "signalfd")


def map_ids(uid: int, gid: int) -> None:
    """Give this new user namespace one user and one group, with their outside numbers."""
    write_file("/proc/self/uid_map", f"{uid} {uid} 1")
    map_group(gid)


def map_group(gid: int) -> None:
    """Give this new user namespace one group."""
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/gid_map", f"{gid} {gid} 1")


def keep_one_capability(capability: int) -> None:
    """Give up all capabilities but this one, which executed programs inherit."""
    _set_capabilities(1 << capability)
    _check(_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability), "keeping a capability")


def drop_capabilities() -> None:
    """Give up all capabilities, now and for whatever is executed later."""
    # The bounding set first: shrinking it needs a capability that is then given up.
    for capability in range(_HIGHEST_CAPABILITY + 1):
        if _drop(_PR_CAPBSET_DROP, capability) < 0:
            if ctypes.get_errno() == errno.EINVAL:  # above the highest that this kernel knows
                break
            _check(-1, "dropping a capability")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(0)


def _set_capabilities(kept: int) -> None:
    """Set the effective, permitted and inheritable capabilities to a mask of the first 32."""
    header, sets = struct.pack("Ii", 0x2008_0522, 0), struct.pack("6I", kept, kept, kept, 0, 0, 0)
    _call(_NUMBERS["capset"], "capset", ctypes.c_char_p(header), ctypes.c_char_p(sets))


def deny_new_privileges() -> None:
    """Let no executed program gain privileges."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def die_with_parent(number: int = 9) -> None:
    """Be killed, or get another signal, when the thread that forked this process ends."""
    _check(_prctl(_PR_SET_PDEATHSIG, number), "pdeathsig")


def become_subreaper() -> None:
    """Be the parent of all orphans below this process."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "subreaper")


def keep_for_ever(value: object) -> None:
    """Never free this: freeing what was made before a fork copies all its pages."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def share_arenas(count: int) -> None:
    """Limit the arenas of the C library's allocator, where it has them (glibc)."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(ctypes.c_int(_ARENA_MAX), ctypes.c_int(count))


def set_dumpable() -> None:
    """Let processes of the same user inspect this one."""
    _check(_prctl(_PR_SET_DUMPABLE, 1), "dumpable")


def clear_dumpable() -> None:
    """Let no process of the same user inspect this one."""
    _check(_prctl(_PR_SET_DUMPABLE, 0), "dumpable")


def close_from(first: int) -> None:
    """Close all descriptors from ``first`` on."""
    _call(_CLOSE_RANGE, "close_range", first, 2**31 - 1, 0)


def gather_memory() -> int:
    """Put this process's private memory into huge pages as far as possible; return how many of 2 MiB there are now.

    A fork copies one entry for a huge page instead of 512. Linux 6.1 and later; elsewhere this does nothing.
    """
    gathered = 0
    with open("/proc/self/maps", encoding="ascii") as file:
        areas = [line.split(maxsplit=5) for line in file]
    for span, rights, _, _, inode, *name in areas:
        if inode != "0" or not rights.startswith("rw-p") or (name and name[0].strip() != "[heap]"):
            continue
        first, _, last = span.partition("-")
        start = -(-int(first, 16) // _HUGE) * _HUGE
        for address in range(start, int(last, 16) - _HUGE + 1, _HUGE):
            size, advice = ctypes.c_size_t(_HUGE), ctypes.c_int(_MADV_COLLAPSE)
            gathered += _libc.madvise(ctypes.c_void_p(address), size, advice) == 0
    return gathered


# Rights of Landlock's first version, then those that later ones added, by the version.
_READ_RIGHTS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read folder
_ALL_RIGHTS = (1 << 13) - 1
_ADDED_RIGHTS = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_NET_RIGHTS = 3
_SCOPES = 3  # abstract sockets and signals
_RULE_PATH = 1


def restrict_paths(readable: list[str], writable: list[str]) -> int:
    """Confine this process and its children to these paths; return Landlock's version. Raises OSError without it."""
    version = _call(_LANDLOCK_CREATE, "landlock", 0, 0, 1)
    rights = _ALL_RIGHTS | sum(right for since, right in _ADDED_RIGHTS.items() if version >= since)
    ruleset = struct.pack("QQQ", rights, _NET_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _call(_LANDLOCK_CREATE, "landlock", ctypes.c_char_p(ruleset), size, 0)
    for paths, allowed in ((readable, _READ_RIGHTS), (writable, rights)):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # Some rights are for folders only.
            here = allowed if os.path.isdir(path) else allowed & (1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15)
            rule = struct.pack("=Qi", here, fd)
            _call(_LANDLOCK_ADD, f"landlock {path}", rules, _RULE_PATH, ctypes.c_char_p(rule), 0)
            os.close(fd)
    _call(_LANDLOCK_RESTRICT, "landlock", rules, 0)
    os.close(rules)
    return version
