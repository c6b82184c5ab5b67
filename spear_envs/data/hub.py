"""Files of a data set repository on Hugging Face: as its own listing has them, or as they lie in a folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from spear_envs.core.errors import SpearError
from spear_envs.data.fetching import fetch
from spear_envs.data.files import RemoteFile

__all__ = ["find_given", "list_given", "list_published", "locate_page"]


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def locate_page(repository: str) -> str:
    """Where a repository is shown to people."""
    return f"{_endpoint()}/datasets/{repository}"


def list_published(repository: str, pattern: str) -> list[tuple[RemoteFile, str]]:
    """The files of a repository, and their paths there, as it lists them (on $HF_ENDPOINT if that is set).

    Args:
        repository: owner and name.
        pattern: regular expression of the paths.

    Raises:
        SpearError: the listing cannot be fetched or read, or has no such file.
    """
    page = locate_page(repository)
    api = RemoteFile(
        "tree.json",
        (f"{_endpoint()}/api/datasets/{repository}/tree/main?recursive=true",),
        manual=f"Open {page} in a browser and download what matches {pattern}.",
    )
    with tempfile.TemporaryDirectory() as folder:
        listed = fetch(api, Path(folder)).read_bytes()
    try:
        entries = [entry for entry in json.loads(listed) if entry["type"] == "file"]
        files = [
            (
                RemoteFile(
                    Path(entry["path"]).name,
                    (f"{page}/resolve/main/{entry['path']}",),
                    size=entry["size"],
                    sha256=entry["lfs"]["oid"] if entry.get("lfs") else None,
                    manual=f"Open {page}/tree/main in a browser and download {entry['path']}.",
                ),
                entry["path"],
            )
            for entry in sorted(entries, key=lambda entry: entry["path"])
            if re.fullmatch(pattern, entry["path"])
        ]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise SpearError(f"{api.urls[0]} gives no listing of files: is $HF_ENDPOINT right? {api.manual}") from error
    if not files:
        raise SpearError(f"{page} has no file {pattern} any more. {api.manual} Then: --from FOLDER.")
    return files


def list_given(given: Path, pattern: str) -> list[tuple[RemoteFile, str]]:
    """The files of a folder, or the one file, whose paths match, with these paths.

    Raises:
        SpearError: there is none.
    """
    base = given if given.is_dir() else given.parent
    paths = sorted(path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file())
    found = [path for path in paths if re.fullmatch(pattern, path) and (given.is_dir() or path == given.name)]
    if not found:
        raise SpearError(f"{given} has no file {pattern} in it: name the folder that has it.")
    return [(RemoteFile(Path(path).name), path) for path in found]


def find_given(given: Path, path: str) -> Path:
    """Where a file of :func:`list_given` lies."""
    return (given / path) if given.is_dir() else given
