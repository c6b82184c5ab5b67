"""Files and the disk: reading them with limits, replacing them whole and synced, digests, and room."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spear_envs.core.errors import SpearError

CHUNK = 2**20
MOST_BYTES = 64 * 2**20
"""Of a file of settings, metrics or a panel; theirs have some megabytes."""
_YAML_BYTES, _YAML_VALUES = 2**20, 100_000
_SHA256 = re.compile(r"[0-9a-f]{64}")

Meter = Callable[[int], None]
"""Called with the number of further bytes."""


@dataclass(frozen=True)
class RemoteFile:
    """A published file."""

    name: str
    """Its name here: one path component."""
    url: str = ""
    """Empty if it can only be fetched by hand."""
    size: int | None = None
    """Bytes; None if unknown."""
    sha256: str | None = None
    """Lower-case hex; None if unknown."""
    manual: str = ""
    """How to get the file by hand, in a sentence."""
    changed: str = ""
    """Advice for a wrong SHA-256, in a sentence."""

    def __post_init__(self) -> None:
        if self.name != Path(self.name).name or self.name in ("", ".", ".."):
            raise ValueError(f"{self.name!r} is not a file name")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.sha256!r} is not a SHA-256 in lower-case hex")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a pipe or a device, which might never answer or never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(fd, "rb")


def read_regular(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole file. Raises OSError as :func:`open_regular` does, and for a file with more bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes >> 20} MiB", os.fspath(path))
        return file.read(size)  # which takes as much memory as it is told


def read_yaml_text(path: str | os.PathLike[str]) -> str:
    """Read a file of YAML that stays small when its aliases are replaced by what they stand for.

    Raises OSError as :func:`read_regular` does, UnicodeDecodeError, or yaml.YAMLError for one that is not YAML or would
    grow beyond a hundred thousand values.
    """
    import yaml

    text = read_regular(path, _YAML_BYTES).decode("utf-8")
    sizes: dict[int, int] = {}

    def measure(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _YAML_VALUES + 1  # one that contains itself
            inside = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = (part for item in inside for part in (item if isinstance(item, tuple) else (item,)))
            sizes[id(node)] = 1 + sum(map(measure, parts))
        return sizes[id(node)]

    # The faster loader in C ends the process for deep nesting; without an asterisk there are no aliases.
    if "*" in text and measure(yaml.compose(text, Loader=yaml.SafeLoader)) > _YAML_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {_YAML_VALUES} values")
    return text


def data_folder() -> Path:
    """Folder of fetched and built data: ``$SPEAR_DATA``, else ``spear-envs`` in the user's cache."""
    named = os.environ.get("SPEAR_DATA", "").strip()
    if named:
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()  # the standard says to ignore relative ones
    return (Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache") / "spear-envs"


def is_offline() -> bool:
    """Whether ``$SPEAR_OFFLINE`` forbids downloads."""
    return os.environ.get("SPEAR_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def digest_file(path: Path, on_bytes: Meter | None = None) -> str:
    """SHA-256 of a file in hex; ``on_bytes`` is called with the number of bytes of each part."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def sync(path: str | os.PathLike[str]) -> None:
    """Have a file or the entries of a folder outlive a power failure."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Have a folder with all that is in it outlive a power failure, except for its own name."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


def put_folder(draft: Path, target: Path) -> None:
    """Rename a finished folder to a free name, which never outlives the content."""
    sync_tree(draft)
    draft.replace(target)
    sync(target.parent)


def put_file(draft: Path, target: Path) -> None:
    """Rename a finished file, so that the name never outlives the content: file, then name, then folder are synced."""
    sync(draft)
    draft.replace(target)
    sync(target.parent)


def replace_text(path: Path, text: str, *, synced: bool = False) -> None:
    """Write a text file, complete or not at all; ``synced``: also after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
    if synced:
        put_file(temporary, path)
    else:
        temporary.replace(path)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Bytes and SHA-256 of files by their paths in a folder, for its manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": digest_file(folder / name)} for name in names}


@contextmanager
def lock_folder(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time work in a folder; before waiting for another, call ``on_wait``, which may raise."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def find_fault(file: RemoteFile, path: Path, on_bytes: Meter | None = None) -> tuple[str, str]:
    """Return the fault of ``path`` as a copy of ``file`` (empty if there is none) and its SHA-256.

    The checksum is computed only if the size is right.
    """
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}", ""
    if size == 0 and file.size is None:
        return "it is empty", ""
    digest = digest_file(path, on_bytes)
    if file.sha256 not in (None, digest):
        return f"its SHA-256 is {digest[:12]}… instead of {str(file.sha256)[:12]}…", digest
    return "", digest


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_space(folder: Path, needed: int, name: str) -> None:
    """Check that ``folder`` has ``needed`` bytes left.

    Raises:
        SpearError: it has fewer; the message is about ``name``.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SpearError(
            f"{name} needs {format_bytes(needed)}, and {folder} has {format_bytes(free)} left: free the disk, "
            "or name a folder on another one with SPEAR_DATA."
        )


@contextmanager
def explain_full_disk(folder: Path, name: str) -> Iterator[None]:
    """Say what to do if the disk of ``folder`` fills up before ``name`` is complete.

    Raises:
        SpearError: it does.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SpearError(
            f"the disk of {folder} is full before {name} is complete: free it, or name a folder on another one with "
            "SPEAR_DATA. The same command then resumes."
        ) from error
