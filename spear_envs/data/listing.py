"""The local files of a data set as fetched, with size and checksum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from spear_envs.data.files import RemoteFile, data_folder, read_checksum
from spear_envs.data.locking import find_digest, find_revision


class Presence(Enum):
    """Whether a file is here."""

    PRESENT = "present"
    """It is; ``spear data verify`` checks it."""
    PARTIAL = "partial"
    """A download was cut off; ``spear data get`` resumes it."""
    ABSENT = "absent"
    """It is not."""


@dataclass(frozen=True)
class Expected:
    """A file of an environment's data set."""

    path: str
    """In the data folder; a folder, with a trailing slash, if only the publisher knows the names of the files."""
    source: str
    """Where it is published."""
    size: int | None = None
    """Bytes, if known in advance."""
    sha256: str | None = None
    repository: str | None = None
    """On the hub."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a data set."""

    path: str
    """In the data folder."""
    presence: Presence
    size: int | None
    """Bytes of the local file, or expected ones; None if unknown."""
    sha256: str | None
    """Locked, or recorded at the download; None if unknown, and for joined files."""
    source: str | None
    """Where it is published."""
    revision: str | None = None
    """The locked commit of a repository, if any."""

    def describe(self) -> dict[str, Any]:
        """Describe it for JSON."""
        return {
            "path": self.path,
            "state": self.presence.value,
            "size": self.size,
            "sha256": self.sha256,
            "source": self.source,
            "revision": self.revision,
        }


@dataclass(frozen=True)
class Collection:
    """Official data, by the name in an environment's keyword or in a command."""

    name: str
    """Such as ``"aime-2024"``."""
    here: bool
    """Whether it can be opened now; ``spear data verify`` checks it."""
    command: str
    """What to run if it cannot."""
    packages: tuple[str, ...] = ()
    """Modules beyond the base installation that reading it needs."""


def expect(folder: str, file: RemoteFile) -> Expected:
    """A file with a fixed name in a folder of the data folder."""
    return Expected(f"{folder}/{file.name}", file.urls[0], file.size, file.sha256)


def list_files(name: str, expected: Iterable[Expected]) -> list[FileEntry]:
    """List the files of a data set, here or not, without those unpacked or built from them.

    Raises:
        SpearError: the record of a checksum cannot be read.
    """
    expected = list(expected)
    base = data_folder()
    marks = (".sha256", ".parts.json", ".part")
    noted = {
        item.relative_to(base).as_posix().removesuffix(mark)
        for mark in marks
        for item in (base / name).rglob(f"*{mark}")
    }
    noted = {path for path in noted if _look(base / path) is not Presence.ABSENT}
    entries = []
    for item in expected:
        if item.path.endswith("/"):
            inside = [path for path in noted if path.startswith(item.path)]
            entries += [_describe(path, item) for path in inside]
            entries += (
                [] if inside else [FileEntry(item.path, Presence.ABSENT, None, None, item.source, _find_commit(item))]
            )
        else:
            entries.append(_describe(item.path, item))
    known = {entry.path for entry in entries}
    entries += [_describe(path, None) for path in noted - known]
    return sorted(entries, key=lambda entry: entry.path)


def _look(path: Path) -> Presence:
    if path.is_file():
        return Presence.PRESENT
    return Presence.PARTIAL if path.with_name(f"{path.name}.part").is_file() else Presence.ABSENT


def _describe(path: str, expected: Expected | None) -> FileEntry:
    here = data_folder() / path
    presence = _look(here)
    recorded = read_checksum(here) if presence is Presence.PRESENT else None
    size, sha256, source = None, None, None
    if expected is not None:
        source = expected.source
        if expected.path == path:
            size, sha256 = expected.size, expected.sha256
    if presence is Presence.PRESENT:
        size = here.stat().st_size
    return FileEntry(path, presence, size, sha256 or find_digest(here) or recorded, source, _find_commit(expected))


def _find_commit(expected: Expected | None) -> str | None:
    return find_revision(expected.repository) if expected is not None and expected.repository else None


def measure(folder: Path) -> int | None:
    """Bytes of all files in a folder; None if there is no folder."""
    if not folder.is_dir():
        return None
    return sum(item.lstat().st_size for item in folder.rglob("*") if item.is_file())
