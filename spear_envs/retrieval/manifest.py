"""The origin of an index, written next to it, so that it is never used with another corpus or model.

An index folder has a part for each way of searching, ``bm25/`` and ``dense/``; its manifest makes a part complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.data.files import describe_files, digest_file, replace_text
from spear_envs.retrieval.corpus import Corpus

MANIFEST = "manifest.json"
POSTINGS, INDEX, EXPORT, EXACT = "postings", "index.faiss", "encoder", "vectors.f16"
"""Files and folders within a part: of ``bm25``; of ``dense`` the index, the encoder, and exact vectors."""
FORMAT = "spear-index"
VERSION = 1
SMALL_FILE = 1 << 22
"""Size up to which opening an index also compares checksums of files, not only lengths."""
MEND = "build the index again ('spear index build')"


class Part(Enum):
    """One way of searching an index folder."""

    BM25 = "bm25"
    """Postings of words."""
    DENSE = "dense"
    """Vectors and their encoder."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a part."""

    folder: Path
    settings: Mapping[str, Any]
    """What affects results, as plain data."""
    notes: Mapping[str, Any]
    """What does not affect them: when and how it was built."""
    files: Mapping[str, Mapping[str, Any]]
    """``bytes`` and ``sha256`` by path in the folder."""
    fingerprint: str
    """SHA-256 in hex, of the corpus, the settings and the files."""


def write_manifest(
    folder: Path, part: Part, corpus: Corpus, settings: Mapping[str, Any], notes: Mapping[str, Any], files: list[str]
) -> None:
    """Turn a folder with these files into a part of an index."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "part": part.value,
        "corpus": {"sha256": corpus.fingerprint, "lines": len(corpus)},
        "settings": dict(settings),
        "files": describe_files(folder, files),
    }
    replace_text(folder / MANIFEST, json.dumps({**content, "notes": dict(notes)}, indent=1) + "\n", synced=True)


def open_manifest(index: Path, part: Part, corpus: Corpus) -> Manifest:
    """Read the manifest of a part and compare it with the corpus and the files.

    Large files are compared by length; :func:`check_digests` compares every byte.

    Raises:
        SpearError: the part is missing, damaged, or of another version or corpus.
    """
    folder = Path(index) / part.value
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SpearError(_explain_absence(Path(index), part)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpearError(f"{path} cannot be read ({error}): {MEND}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("part") != part.value:
        raise SpearError(f"{path} is not a manifest of an index: {MEND}.")
    if content.get("version") != VERSION:
        raise SpearError(f"{folder} is of version {content.get('version')}, not {VERSION}: {MEND}.")
    try:
        notes = content.pop("notes")
        manifest = Manifest(
            folder=folder,
            settings=dict(content["settings"]),
            notes=dict(notes),
            files={str(name): dict(entry) for name, entry in content["files"].items()},
            fingerprint=hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest(),
        )
        found, lines = content["corpus"]["sha256"], int(content["corpus"]["lines"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpearError(f"{path} is damaged ({error!r}): {MEND}.") from error
    if found != corpus.fingerprint:
        raise SpearError(
            f"{folder} is an index of another corpus ({lines:,} documents, SHA-256 {str(found)[:12]}…) than the one at "
            f"hand ({len(corpus):,} documents, SHA-256 {corpus.fingerprint[:12]}…): give that corpus, or {MEND}."
        )
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry, whole=False)
    return manifest


def check_digests(manifest: Manifest) -> None:
    """Compare every byte of a part with its manifest.

    Raises:
        SpearError: a file differs.
    """
    for name, entry in manifest.files.items():
        _check_file(manifest.folder, name, entry, whole=True)


def _check_file(folder: Path, name: str, entry: Mapping[str, Any], *, whole: bool) -> None:
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SpearError(f"{path} is missing from the index ({error.strerror}): {MEND}.") from None
    if size != entry.get("bytes"):
        raise SpearError(f"{path} has {size:,} bytes and should have {entry.get('bytes')}: {MEND}.")
    if (whole or size <= SMALL_FILE) and digest_file(path) != entry.get("sha256"):
        raise SpearError(f"{path} is damaged (its checksum differs): {MEND}.")


def _explain_absence(index: Path, part: Part) -> str:
    if not index.is_dir():
        return f"the index folder {index} does not exist: check the path, or run 'spear index build --out {index}'."
    others = [other.value for other in Part if (index / other.value / MANIFEST).is_file()]
    example = "bm25" if part is Part.BM25 else "hnsw"
    found = f"only the part {others[0]!r}" if others else "no finished index"
    return f"{index} has {found}: 'spear index build --type {example} --out {index}' adds the part {part.value!r}."
