"""Files of a Hugging Face data set repository, from its listing or from a local folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urljoin

from spear_envs.core.errors import SpearError
from spear_envs.data.fetching import fetch
from spear_envs.data.files import RemoteFile
from spear_envs.data.locking import find_revision, record_revision

if TYPE_CHECKING:
    import httpx


Read = TypeVar("Read")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def locate_page(repository: str) -> str:
    """Web page of a repository."""
    return f"{_endpoint()}/datasets/{repository}"


def list_published(repository: str, pattern: str) -> list[tuple[RemoteFile, str]]:
    """List the files of a repository (on $HF_ENDPOINT if that is set) and their paths there.

    It is read at the locked commit, else at the present one of ``main``, which is then locked.

    Raises:
        SpearError: the listing cannot be fetched or read, or has no such file.
    """
    page = locate_page(repository)
    api = f"{_endpoint()}/api/datasets/{repository}"
    manual = f"Open {page} in a browser and download what matches {pattern}."
    commit = find_revision(repository)
    if commit is not None:
        manual += f" If its commit {commit[:12]} is gone: 'spear data unlock {repository}' reads the newest."
    else:
        url = f"{api}/revision/main"
        commit = _read_json(url, manual, _find_commit)[0]
    url = f"{api}/tree/{commit}?recursive=true"
    files: list[tuple[RemoteFile, str]] = []
    seen: set[str] = set()
    while url and url not in seen:
        seen.add(url)
        found, url = _read_json(url, manual, partial(_find_files, page=page, commit=commit, pattern=pattern))
        files += found
    if not files:
        raise SpearError(f"{page} has no file {pattern} at {commit[:12]}. {manual} Then: --from FOLDER.")
    if find_revision(repository) is None:
        record_revision(repository, commit)
    return sorted(files, key=lambda pair: pair[1])


def _read_json(url: str, manual: str, read: Callable[[Any], Read]) -> tuple[Read, str]:
    """Apply ``read`` to JSON at an address; also return the address of the next page, or an empty text."""
    heard: list[httpx.Response] = []
    with tempfile.TemporaryDirectory() as folder:
        path = fetch(RemoteFile("listing.json", (url,), manual=manual), Path(folder), hear=heard.append)
        content = path.read_bytes()
    try:
        found = read(json.loads(content))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SpearError(f"{url} does not list files: is $HF_ENDPOINT right? {manual}") from error
    following = heard[-1].links.get("next", {}).get("url", "")
    return found, urljoin(url, following) if following else ""


def _find_commit(answer: Any) -> str:
    commit = answer["sha"]
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit):
        raise ValueError(commit)
    return str(commit)


def _find_files(answer: Any, *, page: str, commit: str, pattern: str) -> list[tuple[RemoteFile, str]]:
    entries = [entry for entry in answer if entry["type"] == "file" and re.fullmatch(pattern, entry["path"])]
    return [
        (
            RemoteFile(
                Path(entry["path"]).name,
                (f"{page}/resolve/{commit}/{quote(entry['path'])}",),
                size=entry["size"],
                sha256=entry["lfs"]["oid"] if entry.get("lfs") else None,
                manual=f"Open {page}/tree/{commit} in a browser and download {entry['path']}.",
            ),
            entry["path"],
        )
        for entry in entries
    ]


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


def find_given(given: Path, path: str) -> Path:
    """Path of a file from :func:`list_given`."""
    return (given / path) if given.is_dir() else given
