"""Locking revisions and digests of published files, so that later downloads are the same as the first.

What is known in advance is in ``lock.json`` next to this module. Everything else is recorded in the data folder's
``lock.json`` at the first download, which takes precedence; ``null`` in it means that a change was accepted. Both are::

    {"revisions": {"OWNER/NAME on the hub": "commit"}, "files": {"path in the data folder": "SHA-256"}}

Known in advance is one file of WebShop: the copy in the repository WillDreamer/webshop-minimal, which has the size of
the one on Google Drive.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.fetching import fetch
from spear_envs.data.files import RemoteFile, data_folder, read_checksum, record_checksum, write_text

KNOWN = Path(__file__).with_name("lock.json")
_NAME = "lock.json"
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class _Lock:
    revisions: dict[str, str | None]
    files: dict[str, str | None]


def fetch_locked(file: RemoteFile, folder: Path, *, check: Callable[[Path], None] | None = None, **how: Any) -> Path:
    """Get a file as :func:`~spear_envs.data.fetching.fetch`, and compare it with the lock, or record it there.

    Args:
        folder: in the data folder.
        check: raises SpearError for a wrong download, which is then deleted and not recorded.

    Raises:
        SpearError: the file cannot be had, or is not the one that was fetched first.
    """
    path = folder / file.name
    pinned = pin(file, folder)
    known = path.exists()
    fetch(pinned, folder, **how)
    if check is not None:
        try:
            check(path)
        except SpearError:
            if not known:
                for wrong in (path, path.with_name(f"{path.name}.sha256")):
                    wrong.unlink(missing_ok=True)
            raise
    digest = pinned.sha256 or read_checksum(path)
    assert digest is not None, "fetch records it where it is not pinned"
    if read_checksum(path) is None:
        record_checksum(path, digest)
    if find_digest(path) != digest:
        _change(lambda lock: lock.files.update({_name(path): digest}))
    return path


def pin(file: RemoteFile, folder: Path) -> RemoteFile:
    """Return the file with its locked SHA-256, if any.

    Raises:
        SpearError: the publisher states another.
    """
    path = folder / file.name
    locked = find_digest(path)
    if locked is None:
        return file
    accept = f"It was {locked[:12]}… when it was locked: 'spear data unlock {_name(path)}' accepts the change."
    if file.sha256 not in (None, locked):
        raise SpearError(f"{path} has changed where it is published: its SHA-256 is {str(file.sha256)[:12]}…. {accept}")
    return replace(file, sha256=locked, changed=accept)


def find_digest(path: Path) -> str | None:
    """The locked SHA-256 of a file in the data folder, if any."""
    return _read_all().files.get(_name(path))


def find_revision(repository: str) -> str | None:
    """The locked commit of a repository, if any."""
    return _read_all().revisions.get(repository)


def record_revision(repository: str, commit: str) -> None:
    """Lock the commit of a repository."""
    _change(lambda lock: lock.revisions.update({repository: commit}))


def unlock(place: str, repositories: Iterable[str] = ()) -> list[str]:
    """Accept any change of a file, or of those in a folder, and of these repositories.

    Returns:
        What was locked, sorted.
    """
    lock = _read_all()
    held = {path for path, digest in lock.files.items() if digest and f"{path}/".startswith(f"{place}/")}
    read = {name for name in repositories if lock.revisions.get(name)}
    if held or read:
        _change(lambda lock: (lock.files.update(dict.fromkeys(held)), lock.revisions.update(dict.fromkeys(read))))
    return sorted(held | read)


def _name(path: Path) -> str:
    return path.relative_to(data_folder()).as_posix()


def _read_all() -> _Lock:
    known, own = _read(KNOWN), _read(data_folder() / _NAME)
    return _Lock({**known.revisions, **own.revisions}, {**known.files, **own.files})


def _read(path: Path) -> _Lock:
    try:
        data = json.loads(path.read_text("utf-8"))
        lock = _Lock(data["revisions"], data["files"])
        for value in (*lock.revisions.values(), *lock.files.values()):
            if value is not None and not _HEX.fullmatch(value):
                raise ValueError(value)
    except FileNotFoundError:
        return _Lock({}, {})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SpearError(
            f"{path} is not a lock of revisions and digests: restore it from a copy, or delete it, and the next"
            " 'spear data get' records what is here now."
        ) from error
    return lock


def _change(change: Callable[[_Lock], object]) -> None:
    """Change the data folder's lock, safely with other processes."""
    path = data_folder() / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.with_name(f".{_NAME}.mutex"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        lock = _read(path)
        change(lock)
        text = json.dumps({"revisions": lock.revisions, "files": lock.files}, indent=1, sort_keys=True)
        write_text(path, f"{text}\n")
    finally:
        os.close(handle)
