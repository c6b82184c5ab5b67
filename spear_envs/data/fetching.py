"""Getting a complete file: an existing copy, from a folder, a mirror, its publisher or the hub; and the lock.

The lock keeps later downloads the same as the first. What is known in advance is in ``lock.json`` next to this module.
Everything else is recorded in the data folder's ``lock.json`` at the first download, which takes precedence; ``null``
in it means that a change was accepted. Both are::

    {"revisions": {"OWNER/NAME on the hub": "commit"}, "files": {"path in the data folder": "SHA-256"}}

Known in advance is one file of WebShop: the copy in the repository WillDreamer/webshop-minimal, which has the size of
the one on Google Drive.

``$SPEAR_MIRROR`` is the address of somebody's data folder, which then replaces all publishers.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from spear_envs.core.errors import SpearError, first_line
from spear_envs.data.files import (
    CHUNK,
    SHA256,
    RemoteFile,
    check_space,
    data_folder,
    explain_full_disk,
    find_fault,
    hold_lock,
    is_offline,
    put_file,
    write_text,
)
from spear_envs.data.progress import Show, count_bytes, say, show_bytes

if TYPE_CHECKING:
    from spear_sandbox.terminal import Console

KNOWN = Path(__file__).with_name("lock.json")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def fetch(file: RemoteFile, folder: Path, *, source: Path | None = None, console: Console | None = None) -> str:
    """Get a complete, checked copy of ``file`` into ``folder``, and return its SHA-256.

    An existing copy is checked and kept. A download grows as ``<name>.part`` and is renamed when size and checksum are
    right; an interrupted one resumes.

    Args:
        file: what to get.
        folder: target, made if necessary.
        source: copy from this folder (or file) instead of the network.
        console: shows progress; None for silence.

    Raises:
        SpearError: the file cannot be had; the message says why, and what to do by hand.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpearError(f"{folder} cannot be made ({error.strerror}): name another folder.") from error

    def report() -> None:
        if console is not None:
            say(console, f"waiting for another process that is fetching into {folder}")

    path, part = folder / file.name, folder / f"{file.name}.part"
    with hold_lock(folder, report), show_bytes(console) as show:
        digest = ""

        def settle(where: Path = part) -> str:
            nonlocal digest
            fault, digest = find_fault(file, where, count_bytes(show, f"checking {file.name}", where.stat().st_size))
            return fault

        if path.exists():
            if fault := settle(path):
                raise SpearError(f"{path} is not the expected file ({fault}): delete it and fetch it again.")
            return digest
        by_hand = f"By hand: {file.manual or 'Get it from its publisher.'} Then name its folder: --from FOLDER."
        if source is not None:
            # Beside the part: that of an interrupted download goes on with the bytes that its record describes.
            copy = folder / f"{file.name}.copy"
            try:
                found = _copy(file, source, copy, show)
                if fault := settle(copy):
                    advice = file.changed or file.manual
                    raise SpearError(f"{found} is not the expected file ({fault}). {advice}".rstrip())
                put_file(copy, path)
            finally:
                copy.unlink(missing_ok=True)
            for left in (part, part.with_name(f"{part.name}.json")):
                left.unlink(missing_ok=True)
            return digest
        if is_offline():
            raise SpearError(f"{path} is missing, and downloads are forbidden (SPEAR_OFFLINE). {by_hand}")
        if not file.url:
            raise SpearError(f"{path} is missing and has no address. {by_hand}")
        _download(file, part, show, settle, by_hand)
        put_file(part, path)
        return digest


def _copy(file: RemoteFile, source: Path, part: Path, show: Show) -> Path:
    found = source / file.name if source.is_dir() else source
    if not found.is_file():
        raise SpearError(f"{found} does not exist: name the folder of {file.name}, or the file itself.")
    size = found.stat().st_size
    check_space(part.parent, size, file.name)
    count = count_bytes(show, f"copying {file.name}", size)
    try:
        with explain_full_disk(part.parent, file.name), found.open("rb") as original, part.open("wb") as copy:
            while block := original.read(CHUNK):
                copy.write(block)
                count(len(block))
    except (OSError, SpearError):
        part.unlink(missing_ok=True)
        raise
    return found


def _download(file: RemoteFile, part: Path, show: Show, settle: Callable[[], str], by_hand: str) -> None:
    try:
        from spear_envs.data.transfer import RefusedError, download
    except ModuleNotFoundError as error:
        raise SpearError(f"downloads need a package ({error}): pip install 'spear-envs[data]'.") from error
    host = file.url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    try:
        download(file, part, partial(show, f"{file.name} from {host}"), settle)
    except RefusedError as error:
        kept = " The same command resumes the download." if part.exists() else ""
        raise SpearError(f"{file.name} could not be downloaded ({host}: {error}).{kept} {by_hand}") from error


@dataclass(frozen=True)
class _Lock:
    revisions: dict[str, str | None]
    files: dict[str, str | None]


def fetch_locked(
    file: RemoteFile,
    folder: Path,
    *,
    check: Callable[[Path], None] | None = None,
    source: Path | None = None,
    console: Console | None = None,
) -> Path:
    """Get a file as :func:`fetch`, from the mirror if there is one, and compare it with the lock, or record it there.

    Args:
        file: what to get.
        folder: in the data folder.
        check: raises SpearError for a wrong download, which is then deleted and not recorded.
        source: copy from this folder (or file) instead of the network.
        console: shows progress; None for silence.

    Raises:
        SpearError: the file cannot be had, or is not the one that was fetched first.
    """
    path = folder / file.name
    known = path.exists()
    pinned = pin(file, folder)
    mirror = find_mirror()
    if mirror and not known and source is None and not is_offline():
        digest = pinned.sha256 or _read_mirror(mirror).get(_name(path))
        pinned = replace(pinned, url=f"{mirror}/{quote(_name(path))}", sha256=digest)
    if pinned.sha256 is None and not known and console is not None:
        say(console, f"{_name(path)}: its SHA-256 is unknown; that of the first copy is recorded.")
    digest = fetch(pinned, folder, source=source, console=console)
    if check is not None:
        try:
            check(path)
        except SpearError:
            if not known:
                path.unlink(missing_ok=True)
            raise
    record_digest(path, digest)
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
    """Return the locked SHA-256 of a file in the data folder, if any."""
    return _read_all().files.get(_name(path))


def list_locked(place: str) -> list[str]:
    """List the paths of the locked files in a folder of the data folder."""
    return [path for path, digest in _read_all().files.items() if digest and path.startswith(f"{place}/")]


def record_digest(path: Path, digest: str) -> None:
    """Lock the SHA-256 of a file in the data folder."""
    if find_digest(path) != digest:
        _change(lambda lock: lock.files.update({_name(path): digest}))


def find_revision(repository: str) -> str | None:
    """Return the locked commit of a repository, if any."""
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
    known, own = _read(KNOWN), _read(data_folder() / "lock.json")
    return _Lock({**known.revisions, **own.revisions}, {**known.files, **own.files})


def _read(path: Path) -> _Lock:
    try:
        data = json.loads(path.read_text("utf-8"))
        lock = _Lock(data["revisions"], data["files"])
        for values, form in ((lock.revisions, _COMMIT), (lock.files, SHA256)):
            if any(value is not None and not form.fullmatch(value) for value in values.values()):
                raise ValueError(form.pattern)
    except FileNotFoundError:
        return _Lock({}, {})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SpearError(
            f"{path} is not a lock of revisions and digests: restore it from a copy, or delete it."
        ) from error
    return lock


def _change(change: Callable[[_Lock], object]) -> None:
    """Change the data folder's lock, safely with other processes."""
    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder, lambda: None):
        lock = _read(folder / "lock.json")
        change(lock)
        text = json.dumps({"revisions": lock.revisions, "files": lock.files}, indent=1, sort_keys=True)
        write_text(folder / "lock.json", f"{text}\n")


def find_mirror() -> str:
    """Return ``$SPEAR_MIRROR`` without a slash at its end, or an empty text."""
    return os.environ.get("SPEAR_MIRROR", "").strip().rstrip("/")


def _read_mirror(mirror: str) -> dict[str, str]:
    """Read the SHA-256 of the mirror's files, by their paths, from its lock."""
    manual = f"SPEAR_MIRROR={mirror} has to serve a data folder with its lock.json."
    with tempfile.TemporaryDirectory() as folder:
        fetch(RemoteFile("lock.json", f"{mirror}/lock.json", manual=manual), Path(folder))
        try:
            files = _read(Path(folder) / "lock.json").files
        except SpearError as error:
            raise SpearError(f"{mirror}/lock.json is not a lock of revisions and digests. {manual}") from error
    return {path: digest for path, digest in files.items() if digest and _is_plain(path)}


def _is_plain(path: str) -> bool:
    """Return whether a path leads to a file in its folder, without detours or characters that a name cannot have."""
    return path.isprintable() and Path(path).as_posix() == path and not {"..", "/"} & set(Path(path).parts)


def locate_page(repository: str) -> str:
    """Return the web page of a data set's repository, on ``$HF_ENDPOINT`` if that is set."""
    endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
    return f"{endpoint}/datasets/{repository}"


def list_remote(repository: str, folder: Path, pattern: str) -> list[tuple[RemoteFile, str]]:
    """List the files of a repository on the hub, and their paths there; with a mirror, those of its ``folder``.

    The repository is read at the locked commit, else at the present one of ``main``, which is then locked.

    Args:
        repository: of data sets.
        folder: in the data folder, where the files are to be.
        pattern: regular expression of their paths in the repository.

    Raises:
        SpearError: the listing cannot be fetched or read, or has no such file.
    """
    if mirror := find_mirror():
        if is_offline():
            raise SpearError(f"{folder} cannot be fetched: downloads are forbidden (SPEAR_OFFLINE).")
        paths = (path for path in _read_mirror(mirror) if path.startswith(f"{_name(folder)}/"))
        inside = (path.removeprefix(f"{_name(folder)}/") for path in paths)
        files = [(RemoteFile(Path(path).name), path) for path in inside if re.fullmatch(pattern, path)]
        where, manual = f"{mirror}/{_name(folder)}", "Fetch it without SPEAR_MIRROR."
    else:
        page, locked = locate_page(repository), find_revision(repository)
        manual = f"Open {page} in a browser and download what matches {pattern}. Then: --from FOLDER."
        if locked is not None:
            manual += f" If its commit {locked[:12]} is gone: 'spear data unlock {repository}' reads the newest."
        commit, files = _list_hub(repository, locked, pattern, manual)
        where = f"{page} at {commit[:12]}"
    if not files:
        raise SpearError(f"{where} has no file {pattern}. {manual}")
    if not mirror and locked is None:
        record_revision(repository, commit)
    return sorted(files, key=lambda pair: pair[1])


def _list_hub(
    repository: str, revision: str | None, pattern: str, manual: str
) -> tuple[str, list[tuple[RemoteFile, str]]]:
    """Return the commit of a repository, and its matching files."""
    page = locate_page(repository)
    if is_offline():
        raise SpearError(f"{page} cannot be listed: downloads are forbidden (SPEAR_OFFLINE). {manual}")
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        raise SpearError(f"downloads need a package ({error}): pip install 'spear-envs[data]'.") from error
    try:
        api = HfApi(endpoint=page.removesuffix(f"/datasets/{repository}"))
        info = api.dataset_info(repository, revision=revision or "main", files_metadata=True, timeout=60)
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"{commit} is not a commit")
        files = [
            (
                RemoteFile(
                    Path(item.rfilename).name,
                    f"{page}/resolve/{commit}/{quote(item.rfilename)}",
                    size=item.size,
                    sha256=item.lfs.sha256 if item.lfs else None,
                    manual=f"Open {page}/tree/{commit} in a browser and download {item.rfilename}.",
                ),
                item.rfilename,
            )
            for item in info.siblings or ()
            if re.fullmatch(pattern, item.rfilename) and _is_plain(item.rfilename)
        ]
    # The library lets everything through that its parser meets in an answer of another server.
    except Exception as error:
        raise SpearError(f"{page} could not be listed ({first_line(error)}). {manual}") from error
    return commit, files


def list_given(given: Path, pattern: str) -> list[tuple[RemoteFile, str]]:
    """List matching files of a folder, or the one file, with their paths.

    Raises:
        SpearError: there is none.
    """
    base = given if given.is_dir() else given.parent
    paths = sorted(path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file())
    found = [path for path in paths if re.fullmatch(pattern, path) and (given.is_dir() or path == given.name)]
    if not found:
        raise SpearError(f"{given} does not contain {pattern}: name the folder that does.")
    return [(RemoteFile(Path(path).name), path) for path in found]
