"""Mirrors: data folders served over HTTP, tried before the original source.

A mirror is a data folder with a ``manifest.json``, the output of ``spear data list --json``. Any server of plain files
will do: ``python -m http.server --directory "$(spear data path)"``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from spear_envs.core.errors import SpearError
from spear_envs.data.fetching import fetch
from spear_envs.data.files import RemoteFile, data_folder
from spear_envs.data.listing import Presence
from spear_envs.data.locking import pin
from spear_envs.data.progress import say

if TYPE_CHECKING:
    from spear_envs.data.transfer import Patience
    from spear_sandbox.terminal import Console


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Mirror:
    """A served data folder."""

    address: str
    files: Mapping[str, tuple[int, str]]
    """Path in the data folder -> size and SHA-256."""

    def locate(self, path: str) -> str:
        """The address of a file."""
        return f"{self.address}/{quote(path)}"


def open_mirrors(
    addresses: Sequence[str], console: Console | None = None, patience: Patience | None = None
) -> tuple[Mirror, ...]:
    """Open mirrors in order; those without a readable manifest are left out with a note on the console."""
    mirrors = []
    for address in addresses:
        try:
            mirrors.append(_open_mirror(address.rstrip("/"), patience))
        except SpearError as error:
            if console is not None:
                say(console, f"mirror {address} is left out: {error}")
    return tuple(mirrors)


def _open_mirror(address: str, patience: Patience | None) -> Mirror:
    manifest = RemoteFile(
        MANIFEST, (f"{address}/{MANIFEST}",), manual="Its keeper writes it by 'spear data list --json'."
    )
    with tempfile.TemporaryDirectory() as folder:
        content = fetch(manifest, Path(folder), patience=patience).read_bytes()
    try:
        entries = [entry for dataset in json.loads(content)["datasets"] for entry in dataset["files"]]
        whole = [one for one in entries if one["state"] == Presence.PRESENT.value and one["sha256"] is not None]
        return Mirror(address, dict(map(_read_entry, whole)))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SpearError(f"{manifest.urls[0]} is not what 'spear data list --json' prints.") from error


def _read_entry(entry: Mapping[str, Any]) -> tuple[str, tuple[int, str]]:
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{path} leads out of the data folder")
    return path.as_posix(), (int(entry["size"]), str(entry["sha256"]))


def add_mirrors(file: RemoteFile, folder: Path, mirrors: Sequence[Mirror]) -> RemoteFile:
    """Put mirrors of a file before its own addresses.

    A mirror's size and checksum only count if they are neither known nor locked.
    """
    file = pin(file, folder)
    path = (folder / file.name).relative_to(data_folder()).as_posix()
    having = [mirror for mirror in mirrors if path in mirror.files]
    if not having:
        return file
    size, sha256 = having[0].files[path]
    urls = (*(mirror.locate(path) for mirror in having), *file.urls)
    if file.size is None and file.sha256 is None:
        file = replace(file, size=size)
    return replace(file, urls=urls, sha256=file.sha256 or sha256)


def find_mirrored(mirrors: Sequence[Mirror], folder: Path, pattern: str) -> list[tuple[RemoteFile, str]]:
    """List files of ``folder``, and their paths there, from the first mirror with any of them.

    Args:
        pattern: regular expression of the paths in ``folder``.
    """
    prefix = f"{folder.relative_to(data_folder()).as_posix()}/"
    for mirror in mirrors:
        found = [
            (RemoteFile(PurePosixPath(path).name, (mirror.locate(path),), size, sha256), path.removeprefix(prefix))
            for path, (size, sha256) in sorted(mirror.files.items())
            if path.startswith(prefix) and re.fullmatch(pattern, path.removeprefix(prefix))
        ]
        if found:
            return found
    return []
