"""A corpus, one JSON object per line as in Search-R1's ``wiki-18.jsonl``, read in place; and what an index is made of.

Row i is line i + 1. A document has at least ``id`` (unique) and ``contents``, whose first line is the title in quotes.
The first opening parses every line; for a large file the offsets of lines are then kept next to it, so that later ones
take milliseconds and all processes share the pages of text and offsets.

An index is never used with another corpus. An index folder has a part for each way of searching, ``bm25/`` and
``dense/``; its manifest, which has checksums of the corpus and its files, makes a part complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import STRICT_JSON, SpearError, name_error
from spear_envs.data.files import MANIFEST, check_manifest, open_regular, put_file, read_manifest, write_manifest

FORMAT = "spear-corpus-lines-1"
HEADER = 512
"""Bytes of the header of the file of offsets."""
KEPT_FROM = 1 << 25
"""Size of a corpus from which its offsets are kept: parsing less takes a quarter of a second."""
MAX_LINE = 1 << 24
"""Bytes of a line; without a limit, a large file without line breaks would be read at once."""
ARCHIVES = {b"\x1f\x8b": "gunzip -k", b"\xfd7zXZ": "xz -dk", b"BZh": "bunzip2 -k", b"(\xb5/\xfd": "zstd -d"}
REPORTED_LINES = 10_000
POSTINGS, INDEX, EXPORT, EXACT = "postings", "index.faiss", "encoder", "vectors.f16"
"""Files and folders within a part: of ``bm25``; of ``dense`` the index, the encoder, and exact vectors."""
INDEX_FORMAT, VERSION = "spear-index", 1
SMALL_FILE = 1 << 22
"""Size up to which opening an index also compares checksums of files, not only lengths."""
MEND = "build the index again ('spear index build')"

Hit = tuple[int, float]
"""Row of a corpus and score."""
OnLines = Callable[[int, int], None]
"""Called with the numbers of lines and bytes read."""


def digest_plain(plain: Any) -> str:
    """Return the SHA-256 (hex) of plain data."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode("ascii")).hexdigest()


class OpenFile:
    """Bytes of a file that must not change. Not mapped, since a shrinking file would end the process (SIGBUS)."""

    def __init__(self, path: Path, descriptor: int, stat: os.stat_result) -> None:
        self._path = path
        self._descriptor = descriptor
        self._state = _identify(stat)

    def __getitem__(self, span: slice) -> bytes:
        data = os.pread(self._descriptor, span.stop - span.start, span.start)
        if _identify(os.fstat(self._descriptor)) != self._state:
            raise SpearError(f"the corpus {self._path} was written to while it is open: start again.")
        return data

    def __del__(self) -> None:
        os.close(self._descriptor)


class Corpus:
    """Documents by row. Made by :meth:`open` or :meth:`in_memory`; can be used by several threads.

    Attributes:
        fingerprint: SHA-256 of the lines, in hex: of the file's bytes.
        path: the file, or None in memory.
    """

    def __init__(
        self, text: bytes | OpenFile, offsets: npt.NDArray[np.int64], fingerprint: str, path: Path | None
    ) -> None:
        self._text = text
        self._offsets = offsets
        self.fingerprint = fingerprint
        self.path = path

    @classmethod
    def open(cls, path: Path, *, on_lines: OnLines | None = None) -> Corpus:
        """Open a JSONL file.

        Args:
            on_lines: progress of a first reading, which takes some three minutes for the 14 GB of wiki-18.

        Raises:
            SpearError: the file is missing, compressed or empty, or a line is not a document; the message names the
                line.
        """
        path = Path(path).absolute()
        try:
            with open_regular(path) as file:
                stat = os.fstat(file.fileno())
                kept = _read_offsets(path, stat)
                offsets, fingerprint = _scan(file, str(path), on_lines) if kept is None else kept
                text = OpenFile(path, os.dup(file.fileno()), stat)
        except FileNotFoundError:
            raise SpearError(f"the corpus {path} does not exist: check the path.") from None
        except OSError as error:
            raise SpearError(f"the corpus {path} cannot be read ({error.strerror}): check the path.") from error
        if kept is None and stat.st_size >= KEPT_FROM:
            _keep_offsets(path, stat, offsets, fingerprint)
        return cls(text, offsets, fingerprint, path)

    @classmethod
    def in_memory(cls, documents: Sequence[Mapping[str, Any]]) -> Corpus:
        """Make a corpus of documents, with the fingerprint of the file that would hold them.

        Raises:
            SpearError: there is none, or one lacks ``id`` or ``contents``, or two have one id.
        """
        text = b"".join(_dump(row, document) for row, document in enumerate(documents))
        offsets, fingerprint = _scan(BytesIO(text), "the corpus", None)
        return cls(text, offsets, fingerprint, None)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._offsets) - 1

    def raw(self, row: int) -> bytes:
        """Return the document as one JSON object in UTF-8, as it is in the file, without a byte order mark.

        Raises:
            IndexError: there is no such row.
            SpearError: the file was written to since it was opened.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} documents")
        line = self._text[int(self._offsets[row]) : int(self._offsets[row + 1])]
        return (line if row else line.removeprefix(BOM_UTF8)).strip()

    def document(self, row: int) -> dict[str, Any]:
        """Return the document: at least ``id`` and ``contents``.

        Raises:
            IndexError: there is no such row.
        """
        return json.loads(self.raw(row))

    def texts(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Yield ``contents`` of the rows from ``start`` to before ``stop``, in order."""
        return (self.document(row)["contents"] for row in range(len(self))[start:stop])


def _scan(file: BinaryIO, name: str, on_lines: OnLines | None) -> tuple[npt.NDArray[np.int64], str]:
    """Check every line; return the offsets of lines (and the end), and the SHA-256."""
    digest = hashlib.sha256()
    offsets, hashes = array("q", [0]), array("q")
    while line := file.readline(MAX_LINE):
        number = len(offsets)
        if number == 1 and (command := next((ARCHIVES[magic] for magic in ARCHIVES if line.startswith(magic)), None)):
            raise SpearError(f"{name} is compressed, and a corpus is read in place: unpack it with '{command}' first.")
        digest.update(line)
        hashes.append(hash(_read_id(line, number, name)))
        offsets.append(offsets[-1] + len(line))
        if on_lines is not None and number % REPORTED_LINES == 0:
            on_lines(number, offsets[-1])
    lines = len(offsets) - 1
    if not lines:
        raise SpearError(
            f"{name} does not contain documents: write one JSON object per line, with 'id' and 'contents'."
        )
    _refuse_duplicates(file, name, offsets, hashes)
    if on_lines is not None:
        on_lines(lines, offsets[-1])
    return np.frombuffer(offsets, np.int64), digest.hexdigest()


def _read_id(line: bytes, number: int, name: str) -> str:
    """Read the id of the document in a line."""
    try:
        document = _DECODER.decode(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:  # includes bytes that are not UTF-8
        if len(line) == MAX_LINE:
            fault = f"is longer than {MAX_LINE:,} bytes"
        else:
            fault = f"is not JSON ({error})" if line.strip() else "is blank"
    else:
        if not isinstance(document, dict):
            fault = f"is not a JSON object but a {type(document).__name__}"
        elif not isinstance(document.get("contents"), str):
            fault = "lacks a text under 'contents'"
        elif isinstance(identifier := document.get("id"), str | int) and not isinstance(identifier, bool):
            return str(identifier)
        else:
            fault = "lacks a text or whole number under 'id'"
    raise SpearError(
        f'{name}, line {number:,}, {fault}: write one object per line, {{"id": "…", "contents": "\\"Title\\"\\ntext"}}.'
    )


_DECODER = json.JSONDecoder(**STRICT_JSON)


def _refuse_duplicates(file: BinaryIO, name: str, offsets: Sequence[int], hashes: array[int]) -> None:
    """Compare ids only if their hashes are equal, so that twenty million ids need not be in memory."""
    values = np.frombuffer(hashes, np.int64)
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order[1:]] == values[order[:-1]])
    seen: dict[str, int] = {}
    for row in np.unique(np.concatenate([order[same], order[same + 1]])).tolist():
        file.seek(offsets[row])
        identifier = _read_id(file.readline(), row + 1, name)
        if identifier in seen:
            raise SpearError(
                f"{name}: lines {seen[identifier]:,} and {row + 1:,} have the id {identifier[:80]!r}: give each "
                "document one of its own."
            )
        seen[identifier] = row + 1


def _dump(row: int, document: Mapping[str, Any]) -> bytes:
    try:
        line = json.dumps(document, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpearError(
            f"document {row} cannot be written as JSON ({error}): give a dictionary of plain data."
        ) from error
    try:
        return line.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return json.dumps(document).encode("ascii") + b"\n"


def _read_offsets(path: Path, stat: os.stat_result) -> tuple[npt.NDArray[np.int64], str] | None:
    """Map the kept offsets, with their fingerprint; return None if none are of this state of the file."""
    try:
        with open_regular(path.with_name(f"{path.name}.lines")) as file:
            header = json.loads(file.read(HEADER))
            size = os.fstat(file.fileno()).st_size
            if header["corpus"] != _identify(stat) or size != HEADER + 8 * (header["lines"] + 1):
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, np.int64, offset=HEADER), str(header["sha256"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _keep_offsets(path: Path, stat: os.stat_result, offsets: npt.NDArray[np.int64], fingerprint: str) -> None:
    """Write the offsets next to the corpus, if that is allowed."""
    header = {"corpus": _identify(stat), "lines": len(offsets) - 1, "sha256": fingerprint}
    part = path.with_name(f"{path.name}.lines.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(json.dumps(header).encode("ascii").ljust(HEADER))
            file.write(offsets.data)
        put_file(part, path.with_name(f"{path.name}.lines"))
    except OSError:
        part.unlink(missing_ok=True)


def _identify(stat: os.stat_result) -> list[Any]:
    """Return what changes when a file is written."""
    return [FORMAT, stat.st_size, stat.st_mtime_ns]


# ---------------------------------------------------------------- the manifest of an index


class Part(Enum):
    """One way of searching an index folder."""

    BM25 = "bm25"
    """Postings of words."""
    DENSE = "dense"
    """Vectors and their encoder."""


@dataclass(frozen=True)
class IndexManifest:
    """The manifest of a part of an index, ``bm25`` or ``dense``: what it was made of and with."""

    folder: Path
    settings: Mapping[str, Any]
    """What affects results, as plain data."""
    notes: Mapping[str, Any]
    """What does not affect them: when and how it was built."""
    files: Mapping[str, Mapping[str, Any]]
    """``bytes`` and ``sha256`` by path in the folder."""
    fingerprint: str
    """SHA-256 in hex, of the corpus, the settings and the files."""


def finish_part(
    folder: Path, part: Part, corpus: Corpus, settings: Mapping[str, Any], notes: Mapping[str, Any], files: list[str]
) -> None:
    """Turn a folder with these files into a part of an index."""
    content = {
        "format": INDEX_FORMAT,
        "version": VERSION,
        "part": part.value,
        "corpus": {"sha256": corpus.fingerprint, "lines": len(corpus)},
        "settings": dict(settings),
        "notes": dict(notes),
    }
    write_manifest(folder, content, files)


def open_manifest(index: Path, part: Part, corpus: Corpus) -> IndexManifest:
    """Read the manifest of a part and compare it with the corpus and the files.

    Large files are compared by length; :func:`check_files` compares every byte.

    Raises:
        SpearError: the part is missing, damaged, or of another version or corpus.
    """
    folder = Path(index) / part.value
    try:
        content = read_manifest(folder, "an index", MEND, format=INDEX_FORMAT, version=VERSION, part=part.value)
        notes = content.pop("notes")
        manifest = IndexManifest(
            folder=folder,
            settings=dict(content["settings"]),
            notes=dict(notes),
            files=content["files"],
            fingerprint=digest_plain(content),
        )
        found, lines = content["corpus"]["sha256"], int(content["corpus"]["lines"])
    except FileNotFoundError:
        others = [other.value for other in Part if (folder.with_name(other.value) / MANIFEST).is_file()]
        held = f"has only the part {others[0]!r}" if others else "has no finished index"
        example = "bm25" if part is Part.BM25 else "hnsw"
        raise SpearError(
            f"{index} {held if folder.parent.is_dir() else 'does not exist'}: 'spear index build --type {example} "
            f"--out {index}' makes the part {part.value!r}."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpearError(f"{folder / MANIFEST} is damaged ({name_error(error)}): {MEND}.") from error
    if found != corpus.fingerprint:
        raise SpearError(
            f"{folder} is an index of another corpus ({lines:,} documents, SHA-256 {str(found)[:12]}…) than the one at "
            f"hand ({len(corpus):,} documents, SHA-256 {corpus.fingerprint[:12]}…): give that corpus, or {MEND}."
        )
    check_files(manifest, SMALL_FILE)
    return manifest


def check_files(manifest: IndexManifest, most_bytes: float = math.inf) -> None:
    """Compare the files of a part with its manifest: all lengths, and the checksums of files of up to ``most_bytes``.

    Raises:
        SpearError: a file differs.
    """
    check_manifest(manifest.folder, manifest.files, MEND, hashed_bytes=most_bytes)
