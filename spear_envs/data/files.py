"""Files and the disk: reading them with limits, replacing them whole and synced, digests, and room."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from spear_envs.core.errors import SpearError, name_error
from spear_envs.core.tasks import canonical_json

CHUNK = 2**20
MANIFEST = "manifest.json"
MOST_BYTES = 64 * 2**20
"""Most bytes of a file of settings, metrics or a panel; real ones have some megabytes."""
_YAML_BYTES, _YAML_VALUES = 2**20, 100_000
SHA256 = re.compile(r"[0-9a-f]{64}")

Meter = Callable[[int], None]
"""Called with the number of further bytes."""


@dataclass(frozen=True)
class RemoteFile:
    """A published file."""

    name: str
    """Name of the local file: one path component."""
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
        if self.size is not None and not 0 <= self.size < 2**63:
            raise ValueError(f"{self.size!r} is not a number of bytes")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
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
    return decode_yaml(read_regular(path, _YAML_BYTES))


def decode_yaml(content: bytes) -> str:
    """Decode YAML as :func:`read_yaml_text` does, with the same errors."""
    text = content.decode("utf-8")
    require_few_values(text)
    return text


def require_few_values(text: str) -> None:
    """Raise yaml.YAMLError for YAML whose aliases stand for more than a hundred thousand values, or for themselves."""
    import yaml

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


YAML_MISREAD = (ValueError, RecursionError, KeyError, TypeError, AttributeError)
"""Errors beside yaml.YAMLError that PyYAML raises, for values that do not fit their explicit tag."""


class UniqueKeys:
    """Mixin of a loader of PyYAML, which would take the last of several values of a key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that stands twice."""
        import yaml

        seen: set[str] = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)  # type: ignore[misc]


def data_folder() -> Path:
    """Return the folder of fetched and built data: ``$SPEAR_DATA``, else ``spear-envs`` in the user's cache.

    Raises:
        SpearError: neither variable names a folder, and the user has no home.
    """
    named = os.environ.get("SPEAR_DATA", "").strip()
    if named:
        return Path(os.path.expanduser(named)).absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()  # the standard says to ignore relative ones
    if cache and Path(cache).is_absolute():
        return Path(cache) / "spear-envs"
    try:
        return Path.home() / ".cache" / "spear-envs"
    except RuntimeError as error:  # HOME is not set, and the user is in no list
        raise SpearError(f"User {os.getuid()} has no home folder: set SPEAR_DATA to a folder for data.") from error


def is_offline() -> bool:
    """Return whether ``$SPEAR_OFFLINE`` forbids downloads."""
    return os.environ.get("SPEAR_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def digest_file(path: Path, on_bytes: Meter | None = None) -> str:
    """Return the SHA-256 of a file in hex; ``on_bytes`` is called with the number of bytes of each part."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(CHUNK):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def sync(path: str | os.PathLike[str]) -> None:
    """Write a file or the entries of a folder through to the disk, so that a power failure keeps them."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Write a folder with all that is in it through to the disk, except for its own name."""
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


def require_replaceable(path: Path) -> None:
    """Raise SpearError for a folder, a device or a pipe: a rename would make ``/dev/null`` an ordinary file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise SpearError(f"{path} is {'a folder' if os.path.isdir(path) else 'a device or a pipe'}: name a file")


def explain_unwritable(path: Path, error: OSError) -> SpearError:
    """Make the error for a file or folder that cannot be written."""
    reasons = error.args[0] if isinstance(error, shutil.Error) and error.args else None
    why = reasons[0][-1] if isinstance(reasons, list) else error.strerror  # of a whole tree: source, target, reason
    return SpearError(f"{path} cannot be written ({why or error}): choose another folder or free the disk")


def name_draft(target: Path) -> Path:
    """Make a free name beside ``target``; processes of two containers, or a killed one and the next, share numbers."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


@contextmanager
def draft_file(path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Temporary file next to ``path``, which it replaces unless the block fails; ``synced`` outlives a power failure.

    A link stays one: what it leads to is replaced. Raises SpearError if it cannot be written.
    """
    require_replaceable(path)
    target = Path(os.path.realpath(path))
    draft = name_draft(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        if synced:
            put_file(draft, target)
        else:
            draft.replace(target)
    except OSError as error:
        raise explain_unwritable(path, error) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """New folder under a temporary name, which becomes ``path`` when the block ends and is removed if it fails.

    Raises SpearError if it cannot be written, or ``path`` is in the way.
    """
    draft = name_draft(path)
    try:
        draft.mkdir(parents=True)
        yield draft
        put_folder(draft, path)
    except OSError as error:
        raise explain_unwritable(path, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(draft)


def write_text(path: Path, text: str, *, synced: bool = True) -> None:
    """Write a text file as :func:`draft_file` does."""
    with draft_file(path, synced=synced) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as :func:`draft_file` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def describe_file(path: Path, hashed_bytes: float = math.inf) -> dict[str, Any]:
    """Return the bytes of a file and, unless it is larger than ``hashed_bytes``, its SHA-256."""
    size = path.stat().st_size
    return {"bytes": size, "sha256": digest_file(path)} if size <= hashed_bytes else {"bytes": size}


def write_manifest(
    folder: Path, content: Mapping[str, Any], names: Iterable[str], hashed_bytes: float = math.inf
) -> None:
    """Describe files by their paths in a folder, in ``manifest.json``, which marks the folder as complete.

    It must not outlive what it lists, so that the folder is synced first.
    """
    files = {name: describe_file(folder / name, hashed_bytes) for name in names}
    sync_tree(folder)
    sync(folder.parent)
    whole = {**content, "files": files}
    write_json(folder / MANIFEST, {**whole, "checksum": _digest_json(whole)})


def _digest_json(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def read_manifest(folder: Path, kind: str, mend: str, **wanted: Any) -> dict[str, Any]:
    """Read the manifest of a folder, ``kind`` in messages, whose values are to be as ``wanted``.

    Raises:
        FileNotFoundError: there is none.
        SpearError: it cannot be read, or is of another kind or version; ``mend`` says what to do.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(read_regular(path))
        for name, value in wanted.items():
            if (found := content.get(name)) != value:
                raise SpearError(f"{path} is not of {kind}: {name} is {found!r:.100}, not {value!r}: {mend}")
        checksum = content.pop("checksum", None)
        if checksum is not None and checksum != _digest_json(content):
            raise SpearError(f"{path} was changed or cut short: {mend}")
        content["files"] = {str(name): dict(facts) for name, facts in content["files"].items()}
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise SpearError(f"{path} cannot be read ({name_error(error)}): {mend}") from error
    return dict(content)


def is_result(folder: Path, kind: str, others: Iterable[str] = ()) -> bool:
    """Return whether a folder is what a build of this format made, by its manifest.

    A damaged manifest counts beside ``.bin`` files and ``others`` alone, so that a damaged result can be built again.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return content.get("format") == kind
    return path.is_file() and all(
        item.suffix == ".bin" or item.name in (MANIFEST, *others) for item in folder.iterdir()
    )


def check_manifest(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    mend: str,
    *,
    hashed_bytes: float = math.inf,
    on_bytes: Meter | None = None,
) -> None:
    """Compare files with their manifest, larger ones than ``hashed_bytes`` by their length.

    Raises:
        SpearError: a file is missing or differs; ``mend`` says what to do.
    """
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise SpearError(f"{path} is missing: {mend}")
        size = path.stat().st_size
        if size != facts.get("bytes"):
            raise SpearError(f"{path} is damaged, it has {size:,} bytes instead of {facts.get('bytes')}: {mend}")
        digest = facts.get("sha256")
        if digest is not None and size <= hashed_bytes and digest_file(path, on_bytes) != digest:
            raise SpearError(f"{path} is damaged, its checksum differs: {mend}")


@contextmanager
def hold_lock(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of a folder, or of a file, which is made; before waiting for another process, call ``on_wait``.

    ``on_wait`` may raise. A killed process leaves no lock.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def find_last_line(file: IO[bytes]) -> int:
    """Return where the last line of a file begins: at its end if that is a newline."""
    end = file.seek(0, os.SEEK_END)
    while end:  # from the back, since files grow to gigabytes
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


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
