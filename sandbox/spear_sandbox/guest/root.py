"""The way in: an unprivileged user, new namespaces, a small read-only root; then the warm interpreter starts in it."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, TypedDict

from spear_sandbox.guest import kernel
from spear_sandbox.guest.users import choose_users, prepare_map
from spear_sandbox.guest.zygote import FAILED, serve

OOM_SCORE = 500
"""Score of a warm interpreter: where memory is short it is killed after runs and before the pool's process."""
CODE, SITE, HELPERS = "/opt/sandbox/code", "/opt/sandbox/site", "/opt/sandbox/helpers"
_NAMES = "bin include sbin lib lib32 lib64 libexec share/nodejs share/zoneinfo"
SYSTEM_FOLDERS = tuple(f"/usr/{name}" for name in _NAMES.split())
LINKED_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
# Not /dev/zero: a shared mapping of it is memory that is not accounted to a process.
DEVICES = ("null", "full", "random", "urandom")
# Folders that exist everywhere and that no program needs; the new root is built over one of them.
STAGES = ("/sys", "/mnt", "/srv")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    # For interpreters that programs start; the warm one does not read it.
    "PYTHONPATH": SITE,
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": "/tmp",
}


class Settings(TypedDict):
    """What the pool tells the launcher."""

    control: int
    """Descriptor of the socket to the pool."""
    uid: int
    """User to become, if started as root."""
    interpreter: str
    prefix: str
    """Where the interpreter is installed."""
    guest: str
    """Folder of these modules."""
    packages: dict[str, str]
    """Name → file or folder that is to be importable."""
    helpers: dict[str, str]
    """The same for what other languages need, in a separate folder."""
    modules: list[str]
    """What to import before the first run."""


def list_folders(prefix: str) -> list[str]:
    """Return the folders of the system and of the interpreter that the sandbox shows, read-only."""
    own = [os.path.join(prefix, name) for name in ("bin", "lib", "lib64")]
    found = [folder for folder in (*SYSTEM_FOLDERS, *own) if os.path.isdir(folder)]
    return sorted(folder for folder in set(found) if not any(folder.startswith(f"{other}/") for other in found))


def list_hidden(folders: list[str]) -> list[str]:
    """Return the folders of installed packages below these; only the packages of the settings are shown."""
    patterns = ("python3*/site-packages", "python3*/dist-packages")
    return sorted(path for folder in folders for pattern in patterns for path in glob.glob(f"{folder}/{pattern}"))


def enter() -> NoReturn:
    """Build the sandbox, start the warm interpreter in it, and stay until it or the pool ends."""
    settings: Settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        pool = os.pidfd_open(os.getppid())
        kernel.die_first(OOM_SCORE)
        _enter(settings, control, pool)
    except OSError as error:
        control.sendall(FAILED + str(error).encode())
        os._exit(1)


def _enter(settings: Settings, control: socket.socket, pool: int) -> NoReturn:
    shown = [
        *list_folders(settings["prefix"]),
        *settings["packages"].values(),
        *settings["helpers"].values(),
        settings["guest"],
    ]
    stage = next(path for path in STAGES if os.path.isdir(path) and not any(s.startswith(path + "/") for s in shown))

    def build() -> None:
        _build_root(stage, settings)

    # Root may see folders that the user of the sandbox may not, such as an interpreter in a home folder.
    privileged = os.getuid() == 0 and _try_mounts(build)
    users = choose_users()
    write_map = prepare_map(settings["uid"], users) if users else lambda: False
    if os.getuid() == 0:
        _become(settings["uid"])
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.ALL_NAMESPACES)
    if write_map():
        kernel.map_group(gid)
    else:
        users = range(0)
        kernel.map_ids(uid, gid)
    child = os.fork()
    if child:
        control.close()
        _wait_for(child, pool)
    kernel.die_with_parent()
    if not privileged:
        kernel.make_mounts_private()
        build()
    # Neither the name of this machine nor its control groups are the programs' business.
    socket.sethostname("sandbox")
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.NEW_CONTROL_GROUPS)
    hidden = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", f"{stage}/proc", "proc", hidden)
    # Mounts that came from outside can only be moved as one piece; the copy can be made the root.
    kernel.bind(stage, stage, read_only=False, devices=True)
    kernel.enter_root(stage)
    os.umask(0o022)
    os.set_inheritable(control.fileno(), True)
    boot = (
        f"import sys; sys.path.insert(0, {CODE!r}); sys.path.append({SITE!r}); "
        "from spear_sandbox.guest.root import start_warm; start_warm()()"
    )
    # Programs can read these arguments: no path of this machine beyond what is shown anyway.
    numbers = [str(number) for number in (control.fileno(), users.start, users.stop)]
    arguments = [settings["interpreter"], "-I", "-S", "-c", boot, *numbers, *settings["modules"]]
    if users:
        kernel.keep_one_capability(kernel.CAP_SETUID)
    os.execve(settings["interpreter"], arguments, ENVIRONMENT)


def start_warm() -> Callable[[], None]:
    """Be the warm interpreter, inside the sandbox; return in each run."""
    control, first, end = map(int, sys.argv[1:4])
    return serve(socket.socket(fileno=control), sys.argv[4:], range(first, end))


def _try_mounts(build: Callable[[], None]) -> bool:
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except OSError:  # root of a container may not
        return False
    kernel.make_mounts_private()
    build()
    return True


def _become(uid: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise OSError(error.errno, f"root may not become user {uid} here: {error.strerror}") from None
    # Changing the user has made this process not dumpable, so it could not write its own maps.
    kernel.set_dumpable()


def _wait_for(child: int, pool: int) -> NoReturn:
    # Where SIGCHLD is ignored, the kernel may reap the child at any moment.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        process = os.pidfd_open(child)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(pool, select.POLLIN)
        poll.poll()
        # Everything in its pid namespace dies with it. It would also die with this process, but as an orphan, which
        # process 1 of a container may never reap.
        signal.pidfd_send_signal(process, signal.SIGKILL)
        os.waitpid(child, 0)
    os._exit(0)


def _build_root(stage: str, settings: Settings) -> None:
    kernel.mount("tmpfs", stage, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4m,mode=755")
    os.umask(0o022)
    for name in ("dev", "proc", "tmp", "etc", "home"):
        os.mkdir(f"{stage}/{name}")
    # For caches of packages in the warm interpreter. Each run mounts its own folder over it.
    kernel.mount("tmpfs", f"{stage}/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=16m,mode=1777")
    folders = list_folders(settings["prefix"])
    for folder in folders:
        _show(folder, stage + folder)
    for path in LINKED_FOLDERS:
        if os.path.islink(path):
            os.symlink(os.readlink(path), stage + path)
        elif os.path.isdir(path):
            _show(path, stage + path)
    for path in SYSTEM_FILES:
        if os.path.exists(path):
            _show(os.path.realpath(path), stage + path)
    # Before the folders that they lie in are hidden.
    for folder, shown in ((SITE, settings["packages"]), (HELPERS, settings["helpers"])):
        for name, path in shown.items():
            _show(path, f"{stage}{folder}/{name}")
    os.makedirs(f"{stage}{SITE}", exist_ok=True)
    _show(settings["guest"], f"{stage}{CODE}/spear_sandbox/guest")
    for path in list_hidden(folders):
        flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", stage + path, "tmpfs", flags, "size=4k,mode=755")
    _write(f"{stage}/etc/passwd", f"sandbox:x:{settings['uid']}:{settings['uid']}::/tmp:/bin/sh\n")
    _write(f"{stage}/etc/group", f"sandbox:x:{settings['uid']}:\n")
    # Folders on the way to the interpreter hold nothing else; listing them would tell where it is installed.
    for parent in list_parents(settings["prefix"]):
        os.chmod(stage + parent, 0o111)
    for name in DEVICES:
        _write(f"{stage}/dev/{name}", "")
        # Read-only, which lets devices be written, but keeps their times: all runs and the machine share them.
        kernel.bind(f"/dev/{name}", f"{stage}/dev/{name}", devices=True)
    os.symlink("/tmp", f"{stage}/dev/shm")
    os.symlink("/proc/self/fd", f"{stage}/dev/fd")


def list_parents(prefix: str) -> list[str]:
    """Return the folders from the root to where the interpreter is installed that hold nothing else in the sandbox."""
    parts = prefix.strip("/").split("/")
    parents = ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [
        parent for parent in parents if not any(f"{path}/".startswith(f"{parent}/") for path in (*SYSTEM_FOLDERS, CODE))
    ]


def _show(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    kernel.bind(source, target)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
