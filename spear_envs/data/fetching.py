"""Getting a complete file: an existing copy, from a folder, or from the network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spear_envs.core.errors import SpearError
from spear_envs.data.files import (
    CHUNK,
    RemoteFile,
    find_fault,
    hold_lock,
    is_offline,
    put_file,
    record_checksum,
    verify,
)
from spear_envs.data.progress import Show, count_bytes, say, show_bytes
from spear_envs.data.space import check_space, explain_full_disk

if TYPE_CHECKING:
    import httpx

    from spear_envs.data.transfer import Patience
    from spear_sandbox.terminal import Console


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    source: Path | None = None,
    offline: bool = False,
    console: Console | None = None,
    patience: Patience | None = None,
    hear: Callable[[httpx.Response], None] | None = None,
) -> Path:
    """Get a complete, checked copy of ``file`` into ``folder``, and return its path.

    An existing copy is checked and kept. A download grows as ``<name>.part`` and is renamed when size and checksum are
    right; an interrupted one resumes. If the checksum is unknown, that of the first copy is recorded in
    ``<name>.sha256``.

    Args:
        file: what to get.
        folder: target, made if necessary.
        source: copy from this folder (or file) instead of the network.
        offline: refuse to download, like ``$SPEAR_OFFLINE``.
        console: shows progress; None for silence.
        patience: with servers in trouble.
        hear: called with each response that has (part of) the file, for its headers.

    Raises:
        SpearError: the file cannot be had; the message says why, and what to do by hand.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpearError(f"{folder} cannot be made ({error.strerror}): name another folder.") from error

    def tell() -> None:
        if console is not None:
            say(console, f"waiting for another process that is fetching into {folder}")

    path = folder / file.name
    with hold_lock(folder, tell), show_bytes(console) as show:
        if path.exists():
            verify(file, folder, count_bytes(show, f"checking {file.name}", path.stat().st_size))
            return path
        part = folder / f"{file.name}.part"
        if source is not None:
            _copy(file, source, part, show)
        elif offline or is_offline():
            raise SpearError(f"{path} is missing, and downloads are forbidden (SPEAR_OFFLINE). {_by_hand(file)}")
        else:
            _download(file, part, patience, show, hear)
        put_file(part, path)
        return path


def _copy(file: RemoteFile, source: Path, part: Path, show: Show) -> None:
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
    if fault := _settle(file, part, show):
        part.unlink()
        raise SpearError(f"{found} is not the expected file ({fault}). {file.changed or file.manual}".rstrip())


def _download(
    file: RemoteFile,
    part: Path,
    patience: Patience | None,
    show: Show,
    hear: Callable[[httpx.Response], None] | None,
) -> None:
    try:
        from spear_envs.data.transfer import Patience, RefusedError, Transfer, open_client
    except ModuleNotFoundError as error:
        raise SpearError(f"downloads need a package ({error}): pip install 'spear-envs[data]'.") from error

    patience = patience or Patience()
    refusals, changed = [], ""
    with open_client(patience) as client:
        for url in file.urls:
            host = urlsplit(url).netloc
            transfer = Transfer(file, part, client, patience, partial(show, f"{file.name} from {host}"), hear)
            try:
                transfer.run(url)
                fault = _settle(file, part, show)
                if fault and transfer.resumed:  # perhaps only the older bytes are wrong
                    transfer.drop()
                    transfer.run(url)
                    fault = _settle(file, part, show)
            except RefusedError as error:
                refusals.append(f"{host}: {error}")
                continue
            if not fault:
                transfer.state_path.unlink(missing_ok=True)
                return
            transfer.drop()
            refusals.append(f"{host}: it sends another file, {fault}")
            changed = f" {file.changed}" if file.changed else ""
    why = f" ({'; '.join(refusals)})" if refusals else ""
    kept = " The same command resumes the download." if part.exists() else ""
    raise SpearError(f"{file.name} could not be downloaded{why}.{changed}{kept} {_by_hand(file)}")


def _settle(file: RemoteFile, part: Path, show: Show) -> str:
    """Check the part and return its fault, if any; else record its checksum unless it is pinned."""
    count = count_bytes(show, f"checking {file.name}", part.stat().st_size)
    fault, digest = find_fault(file, part, file.sha256, count)
    if not fault and file.sha256 is None:
        record_checksum(part.with_name(file.name), digest)
    return fault


def _by_hand(file: RemoteFile) -> str:
    how = file.manual or (f"It is published at {file.urls[0]}." if file.urls else "Get it from its publisher.")
    return f"By hand: {how} Then name its folder: --from FOLDER."
