"""Third-party files: size and digest, local path, and checking copies."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
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
    urls: tuple[str, ...] = ()
    """Tried in turn; empty if it can only be fetched by hand."""
    size: int | None = None
    """Bytes; None if unknown."""
    sha256: str | None = None
    """Lower-case hex; None if unknown, and then recorded next to the file at the first download."""
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


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def read_checksum(path: Path) -> str | None:
    """Read the checksum recorded next to a file, if any.

    Raises:
        SpearError: the record cannot be read.
    """
    record = _checksum_path(path)
    try:
        words = record.read_text("utf-8").split()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        words = []
    if not words or not _SHA256.fullmatch(words[0]):
        raise SpearError(f"{record} is not a checksum: delete it, and also {path.name} unless you trust the file.")
    return words[0]


def record_checksum(path: Path, digest: str) -> None:
    """Write a file's checksum next to it, for ``sha256sum -c``."""
    replace_text(_checksum_path(path), f"{digest}  {path.name}\n", synced=True)


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


def find_fault(file: RemoteFile, path: Path, expected: str | None, on_bytes: Meter | None = None) -> tuple[str, str]:
    """Return the fault of ``path`` as a copy of ``file`` (empty if there is none) and its SHA-256.

    The checksum is computed only if the size is right, and compared with ``expected`` unless that is None.
    """
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}", ""
    if size == 0 and file.size is None:
        return "it is empty", ""
    digest = digest_file(path, on_bytes)
    if expected is not None and digest != expected:
        return f"its SHA-256 is {digest[:12]}… instead of {expected[:12]}…", digest
    return "", digest


def verify(file: RemoteFile, folder: Path, on_bytes: Meter | None = None) -> str:
    """Check the copy of ``file`` in ``folder`` and return its SHA-256.

    It is compared with the pinned checksum, else with that recorded at the first download. If there is neither, the
    file counts as right, and its checksum is recorded.

    Raises:
        SpearError: the file is missing, incomplete or another one.
    """
    path = folder / file.name
    if not path.is_file():
        raise SpearError(f"{path} is missing: 'spear data get' fetches it.")
    expected = file.sha256 or read_checksum(path)
    fault, digest = find_fault(file, path, expected, on_bytes)
    if fault:
        also = "" if file.sha256 else f", and {_checksum_path(path).name} if there is one,"
        raise SpearError(f"{path} is not the expected file ({fault}): delete it{also} and fetch it again.")
    if expected is None:
        record_checksum(path, digest)
    return digest
