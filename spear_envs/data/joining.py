"""Joining published parts and unpacking gzip, with as little disk space as possible."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from spear_envs.core.errors import SpearError
from spear_envs.data.files import CHUNK, put_file, record_checksum, write_text
from spear_envs.data.progress import show_bytes
from spear_envs.data.space import explain_full_disk

if TYPE_CHECKING:
    from spear_sandbox.terminal import Console


LARGEST_COPY = 2**30


@dataclass(frozen=True)
class Part:
    """One part of a file."""

    name: str
    size: int
    sha256: str


def _list_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts.json")


def _work_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.joining")


def is_joining(target: Path) -> bool:
    """Whether joining ``target`` was interrupted, so that some parts are gone."""
    return _work_path(target).exists()


def join_parts(folder: Path, target: Path, parts: Sequence[Part] = (), *, console: Console | None = None) -> None:
    """Join checked parts in ``folder`` to ``target`` in order; each part is deleted once it has been added.

    The first part becomes the beginning of the file, so the disk only needs room for one further part, and for none if
    the file system shares blocks. The parts are listed in ``<target>.parts.json``. After an interruption the same call
    resumes.

    Args:
        parts: in order; ignored when an interrupted join resumes.

    Raises:
        SpearError: a part is missing, or the disk is full.
    """
    work, listing = _work_path(target), _list_path(target)
    if work.exists():
        parts = _read_parts(listing)
    else:
        write_text(listing, json.dumps([asdict(part) for part in parts], indent=1))
        (folder / parts[0].name).replace(work)
    total = sum(part.size for part in parts)
    with show_bytes(console) as show, work.open("r+b") as file:
        start = parts[0].size
        for part in parts[1:]:
            path = folder / part.name
            if path.exists():
                file.truncate(start)
                file.seek(start)
                show(f"joining {target.name}", start, total)
                with explain_full_disk(folder, target.name):
                    _append(file, path)
                os.fsync(file.fileno())
                path.unlink()
            elif file.seek(0, os.SEEK_END) < start + part.size:
                raise SpearError(f"{path} is missing, also in {work}: delete both and fetch them again.")
            start += part.size
        if file.seek(0, os.SEEK_END) != total:
            raise SpearError(f"{work} does not have the size of its parts: delete it and fetch them again.")
    put_file(work, target)


def _append(file: IO[bytes], path: Path) -> None:
    """Copy within the kernel if possible, which shares blocks on some file systems."""
    with path.open("rb") as part:
        left = path.stat().st_size
        file.flush()
        try:
            while left:
                copied = os.copy_file_range(part.fileno(), file.fileno(), min(left, LARGEST_COPY))
                if not copied:
                    break
                left -= copied
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        os.lseek(part.fileno(), -left, os.SEEK_END)
        while left and (block := os.read(part.fileno(), CHUNK)):
            while block:
                written = os.write(file.fileno(), block)
                left -= written
                block = block[written:]


def verify_joined(target: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Check a joined file against the checksums of its parts.

    Raises:
        SpearError: it differs.
    """
    with target.open("rb") as file:
        for part in _read_parts(_list_path(target)):
            digest, left = hashlib.sha256(), part.size
            while left and (block := file.read(min(left, CHUNK))):
                digest.update(block)
                left -= len(block)
                if on_bytes is not None:
                    on_bytes(len(block))
            if left or digest.hexdigest() != part.sha256:
                raise SpearError(f"{target} is damaged in what was {part.name}: delete it and fetch it again.")
        if file.read(1):
            raise SpearError(f"{target} is longer than its parts: delete it and fetch it again.")


def _read_parts(listing: Path) -> list[Part]:
    try:
        return [Part(**part) for part in json.loads(listing.read_text("utf-8"))]
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise SpearError(f"{listing} does not say what the parts were: delete it and fetch them again.") from error


def expand_gzip(packed: Path, target: Path, *, console: Console | None = None) -> None:
    """Unpack a ``.gz`` of one file to ``target`` atomically, and record its checksum next to it.

    Raises:
        SpearError: it is damaged, or the disk is full.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    total = packed.stat().st_size
    digest = hashlib.sha256()
    try:
        with explain_full_disk(target.parent, target.name):
            with (
                show_bytes(console) as show,
                packed.open("rb") as raw,
                gzip.open(raw) as stream,
                temporary.open("wb") as file,
            ):
                while block := stream.read(CHUNK):
                    file.write(block)
                    digest.update(block)
                    show(f"unpacking {packed.name}", raw.tell(), total)
            record_checksum(target, digest.hexdigest())
        put_file(temporary, target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SpearError(f"{packed} cannot be unpacked ({error}): delete it and fetch it again.") from error
    finally:
        temporary.unlink(missing_ok=True)
