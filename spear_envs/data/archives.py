"""Unpacking third-party archives, only plain files and folders inside the target folder; and joining parts."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import CHUNK, check_space, explain_full_disk, format_bytes, name_draft, put_file
from spear_envs.data.progress import show_bytes

if TYPE_CHECKING:
    from spear_sandbox.terminal import Console


# Raised by the standard library for damaged, encrypted and unknown (RuntimeError) archives, for names that are empty
# (IndexError) or not UTF-8 (ValueError), and for sizes of hundreds of digits (ValueError, OverflowError).
_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    IndexError,
    OverflowError,
)


@dataclass(frozen=True)
class _Member:
    """One file of an archive."""

    name: str
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack_archive(
    archive: Path,
    folder: Path,
    *,
    max_bytes: int = 50 * 10**9,
    max_files: int = 1_000_000,
    console: Console | None = None,
) -> int:
    """Unpack a zip or tar archive (also gzip, bzip2, xz) into ``folder``; return the number of files.

    All members are checked before the first is written. Files are written atomically; existing ones are kept unless the
    archive has them, too. Owners, permissions and dates are ignored.

    Raises:
        SpearError: the archive is damaged or encrypted, a member would land outside ``folder`` or is not a plain file
            (links, devices), it is larger than allowed, the disk is too small, or the folder cannot be written.
    """
    name = f"what is in {archive.name}"
    try:
        with (
            explain_full_disk(folder, name),
            _list_members(archive, max_files) as members,
            show_bytes(console) as show,
        ):
            total = sum(member.size for member in members)
            if total > max_bytes:
                raise SpearError(
                    f"{archive} would unpack to {format_bytes(total)}, more than the {format_bytes(max_bytes)} that "
                    "are allowed: do not use it."
                )
            folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, total, name)
            root = folder.resolve()
            done = 0
            for member in members:
                _write_member(member, root, archive)
                done += member.size
                show(f"unpacking {archive.name}", done, total)
            return len(members)
    except _BROKEN as error:
        raise _explain_damage(archive, error) from error
    except OSError as error:
        if error.filename is None:  # from reading: damaged data, impossible sizes
            raise _explain_damage(archive, error) from error
        if error.filename == str(archive):
            raise
        # A folder where a file is to be, in the archive itself or in what was there; a name that is too long.
        raise SpearError(
            f"{archive} cannot be unpacked into {folder} ({error.strerror}): choose another folder, or another archive."
        ) from error


def join_files(paths: Sequence[Path], target: Path, *, console: Console | None = None) -> str:
    """Write ``target`` whole from its parts in order, unpacking those named ``.gz``, and return its SHA-256.

    Raises:
        SpearError: a part is damaged, or the disk is too small.
    """
    temporary = name_draft(target)
    total = sum(path.stat().st_size for path in paths)
    check_space(target.parent, total, target.name)
    digest, done = hashlib.sha256(), 0
    try:
        with (
            explain_full_disk(target.parent, target.name),
            show_bytes(console) as show,
            temporary.open("wb") as file,
        ):
            for path in paths:
                with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as stream:
                    try:
                        while block := stream.read(CHUNK):
                            file.write(block)
                            digest.update(block)
                            show(f"writing {target.name}", done + raw.tell(), total)
                    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                        raise _explain_damage(path, error) from error
                done += path.stat().st_size
        put_file(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def _explain_damage(archive: Path, error: Exception) -> SpearError:
    reason = first_line(error).rstrip(":")
    return SpearError(f"{archive} cannot be unpacked ({reason}): delete it and fetch it again.")


@contextmanager
def _list_members(archive: Path, max_files: int) -> Iterator[list[_Member]]:
    """List the plain files of an archive, with safe names."""
    members: list[_Member] = []

    def add(name: str, kind: int, size: int, opener: Callable[[], IO[bytes] | None]) -> None:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in (path.parts or ("",))[0]:
            raise SpearError(
                f"{archive} would write outside its folder ({name!r}): nothing was unpacked; do not use it."
            )
        if kind == stat.S_IFDIR:
            return
        if not path.parts:
            raise SpearError(f"{archive} has a file without a name: nothing was unpacked; do not use it.")
        if kind != stat.S_IFREG:
            raise SpearError(f"{archive} has a link or a device ({name!r}): nothing was unpacked; do not use it.")
        members.append(_Member(name, size, opener))
        if len(members) > max_files:
            raise SpearError(f"{archive} has more than {max_files:,} files: do not use it.")

    # An archive of tar whose last member is a zip looks like one from its end.
    if zipfile.is_zipfile(archive) and not tarfile.is_tarfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                # Only archives made on Unix have types of members; others have files and folders.
                kind = stat.S_IFMT(info.external_attr >> 16) if info.create_system == 3 else 0
                kind = stat.S_IFDIR if info.is_dir() else kind or stat.S_IFREG
                # The original name: zipfile hides backslashes and zero bytes.
                add(info.orig_filename, kind, info.file_size, partial(zipped.open, info))
            yield members
    else:
        with tarfile.open(archive) as tarred:
            for entry in tarred:
                kind = stat.S_IFREG if entry.isreg() else stat.S_IFDIR if entry.isdir() else 0
                add(entry.name, kind, entry.size, partial(tarred.extractfile, entry))
            while tarred.fileobj is not None and tarred.fileobj.read(CHUNK):
                pass  # the checksum of a compressed archive is at its end
            yield members


def _write_member(member: _Member, root: Path, archive: Path) -> None:
    target = root / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(root):  # through an existing link in the folder
        raise SpearError(f"{target.parent} leads out of {root}: remove that link, then unpack again.")
    temporary = name_draft(target.with_name(target.name[:100]))
    stream = member.open()
    if stream is None:
        raise SpearError(f"{archive} lists {member.name!r} without its content: delete it and fetch it again.")
    written = 0
    try:
        with stream, temporary.open("xb") as file:
            while block := stream.read(CHUNK):
                written += len(block)
                if written > member.size:
                    raise SpearError(f"{archive} holds more in {member.name!r} than it says: do not use it.")
                file.write(block)
        if written < member.size:
            raise SpearError(f"{archive} holds less in {member.name!r} than it says: delete it and fetch it again.")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
