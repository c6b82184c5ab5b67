"""Building an index on disk: chunks of documents are analysed by several processes, then merged.

Everything is made in a folder next to the index, ``<name>.partial``, and moved into place when it is complete. A chunk
is a file named after the SHA-256 of its texts, so an interrupted build finds its finished chunks again unless the texts
have changed. Memory is bounded by the texts of a few chunks, or by a stretch of the merge.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.analysis import remember_words
from spear_envs.bm25.files import FORMAT, VERSION, ArrayWriter, finish_index
from spear_envs.bm25.packing import PADDING, count_blocks, find_factors, pack_pairs
from spear_envs.bm25.postings import Postings, make_postings, pack_terms, unpack_terms
from spear_envs.core.errors import SpearError
from spear_envs.data.files import is_result, put_file
from spear_envs.data.processes import explain_build, hold_folder, map_in_order, replace_folder

MAX_DOCUMENTS = 1 << 16
"""Documents of a chunk: their numbers have two bytes."""
HEADER = 1_024
TYPES = {"term_bytes": "u1", "term_ends": "<i8", "starts": "<i8", "documents": "<u2", "counts": "<u2", "norms": "u1"}


@dataclass(frozen=True)
class Chunk:
    """A finished chunk."""

    path: Path
    sizes: dict[str, int]
    """Length of each array."""
    terms_total: int
    filled: int
    checksum: int

    @classmethod
    def open(cls, path: Path) -> Chunk:
        """Read the header of a file.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not a chunk.
        """
        with path.open("rb") as file:
            return cls(path, **json.loads(file.read(HEADER)))

    def read(self, array: str, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Read a part of an array."""
        # Only the part is read, by its place in the file: a merge holds a stretch of each chunk, never a whole one.
        before = HEADER
        for name, kind in TYPES.items():
            if name == array:
                break
            before += self.sizes[name] * np.dtype(kind).itemsize
        stop = self.sizes[name] if stop is None else stop
        dtype = np.dtype(TYPES[array])
        return np.fromfile(self.path, dtype, stop - start, offset=before + start * dtype.itemsize)

    def is_whole(self) -> bool:
        """Read everything and compare the checksum."""
        checksum = 0
        for name in TYPES:
            values = self.read(name)
            if len(values) != self.sizes[name]:
                return False
            checksum = zlib.crc32(values.data, checksum)
        return checksum == self.checksum


def write_chunk(postings: Postings, path: Path) -> None:
    """Write the postings of at most ``MAX_DOCUMENTS`` documents atomically."""
    arrays = [np.ascontiguousarray(getattr(postings, array), kind) for array, kind in TYPES.items()]
    checksum = 0
    for values in arrays:
        checksum = zlib.crc32(values.data, checksum)
    header = {
        "sizes": dict(zip(TYPES, map(len, arrays), strict=True)),
        "terms_total": postings.terms_total,
        "filled": postings.filled,
        "checksum": checksum,
    }
    part = path.with_suffix(f".{os.getpid()}")  # chunks of equal texts share a name
    with part.open("wb") as file:
        file.write(json.dumps(header).encode("ascii").ljust(HEADER))
        for values in arrays:
            file.write(values.data)
    put_file(part, path)


STRETCH_PAIRS = 1 << 22
"""Pairs merged at a time, approximately; a single term may have more."""


def merge_chunks(chunks: Sequence[Chunk], folder: Path) -> None:
    """Write the index of all chunks, whose documents follow one another."""
    terms_total, filled = sum(chunk.terms_total for chunk in chunks), sum(chunk.filled for chunk in chunks)
    norms = np.concatenate([np.empty(0, np.uint8), *(chunk.read("norms") for chunk in chunks)])
    factors = find_factors(terms_total, filled)[norms]
    # Chunks cannot be packed where they are made: a block's bound needs the mean length over all documents.
    with ArrayWriter(folder) as writer:
        writer.append("norms", norms)
        writer.append("term_ends", np.zeros(1))
        writer.append("starts", np.zeros(1))
        terms, letters, blocks, offset = 0, 0, 0, 0
        for stretch in _cut_stretches(chunks):
            term_bytes, term_ends = pack_terms(stretch.terms)
            pairs = pack_pairs(stretch.frequencies, stretch.documents, stretch.counts, factors, offset)
            writer.append("term_bytes", term_bytes)
            writer.append("term_ends", term_ends[1:] + letters)
            writer.append("frequencies", stretch.frequencies)
            writer.append("starts", np.cumsum(count_blocks(stretch.frequencies)) + blocks)
            writer.append("mapped", pairs.mapped + np.uint32(terms))
            for array in ("peaks", "lasts", "blocks", "data", "maps"):
                writer.append(array, getattr(pairs, array))
            terms += len(stretch.terms)
            letters += len(term_bytes)
            blocks += len(pairs.blocks)
            offset += len(pairs.data)
        writer.append("data", np.zeros(PADDING))
    finish_index(folder, terms_total, filled)


@dataclass(frozen=True)
class _Stretch:
    """The pairs of some neighbouring terms, of one chunk or of all: T terms and P pairs."""

    terms: list[bytes]
    frequencies: npt.NDArray[np.int64]
    documents: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint16]

    @classmethod
    def read(cls, chunk: Chunk, start: int, stop: int, first: int) -> _Stretch:
        """Read the terms from ``start`` to before ``stop``; ``first`` is the number of the chunk's first document."""
        ends = chunk.read("term_ends", start, stop + 1)
        starts = chunk.read("starts", start, stop + 1)
        pairs = int(starts[0]), int(starts[-1])
        return cls(
            terms=unpack_terms(chunk.read("term_bytes", int(ends[0]), int(ends[-1])), ends - ends[0]),
            frequencies=np.diff(starts),
            documents=chunk.read("documents", *pairs) + np.uint32(first),
            counts=chunk.read("counts", *pairs),
        )


def _cut_stretches(chunks: Sequence[Chunk]) -> Iterator[_Stretch]:
    """Yield all terms in ascending order, a stretch at a time."""
    borders = _choose_borders(chunks)
    cuts = [_find_terms(chunk, borders) for chunk in chunks]
    firsts = np.cumsum([0] + [chunk.sizes["norms"] for chunk in chunks])
    for column in range(len(borders) + 1):
        parts = [
            _Stretch.read(chunk, cuts[row][column], cuts[row][column + 1], int(firsts[row]))
            for row, chunk in enumerate(chunks)
        ]
        if parts := [part for part in parts if part.terms]:
            yield _join_parts(parts)


def _join_parts(parts: list[_Stretch]) -> _Stretch:
    """Join the pairs of each term, part after part."""
    terms = sorted(set().union(*(part.terms for part in parts)))
    numbers = {term: number for number, term in enumerate(terms)}
    ranks = [np.fromiter(map(numbers.__getitem__, part.terms), np.int64, len(part.terms)) for part in parts]
    frequencies = np.zeros(len(terms), np.int64)
    for part, rank in zip(parts, ranks, strict=True):
        frequencies[rank] += part.frequencies
    # Where the next pair of each term goes. Parts are in order of their documents, so those of a term stay ascending.
    places = np.cumsum(frequencies) - frequencies
    documents = np.empty(int(frequencies.sum()), np.uint32)
    counts = np.empty(len(documents), np.uint16)
    for part, rank in zip(parts, ranks, strict=True):
        starts = np.cumsum(part.frequencies) - part.frequencies
        targets = np.repeat(places[rank] - starts, part.frequencies) + np.arange(len(part.documents))
        documents[targets] = part.documents
        counts[targets] = part.counts
        places[rank] += part.frequencies
    return _Stretch(terms, frequencies, documents, counts)


def _choose_borders(chunks: Sequence[Chunk]) -> list[bytes]:
    """Choose the terms that begin a stretch, ascending, with about ``STRETCH_PAIRS`` pairs between two of them."""
    # Each chunk offers a term every so many pairs; together they stand for the pairs between two terms of the whole.
    step = max(STRETCH_PAIRS // (2 * max(len(chunks), 1)), 1)
    samples = []
    for chunk in chunks:
        starts, ends = chunk.read("starts"), chunk.read("term_ends")
        text = chunk.read("term_bytes")
        places = np.unique(np.searchsorted(starts, np.arange(step, int(starts[-1]), step)))
        places = places[places < len(starts) - 1]
        for place, pairs in zip(places.tolist(), np.diff(starts[places], prepend=0).tolist(), strict=True):
            samples.append((text[ends[place] : ends[place + 1]].tobytes(), pairs))
    borders, pairs_since = [], 0
    samples.sort()
    for (term, pairs), (following, _) in pairwise([*samples, (b"", 0)]):
        pairs_since += pairs
        if pairs_since >= STRETCH_PAIRS // 2 and term != following:
            borders.append(term)
            pairs_since = 0
    return borders


def _find_terms(chunk: Chunk, borders: list[bytes]) -> list[int]:
    """Find the starts of the stretches among the chunk's terms, and the end."""
    ends, text = chunk.read("term_ends"), chunk.read("term_bytes")
    terms = range(len(ends) - 1)
    found = [bisect_left(terms, border, key=lambda i: text[ends[i] : ends[i + 1]].tobytes()) for border in borders]
    return [0, *found, len(terms)]


# Whichever comes first ends a chunk: numbers of two bytes, and the memory of the process that indexes it.
CHUNK_DOCUMENTS = MAX_DOCUMENTS
CHUNK_CHARACTERS = 1 << 26
Job = tuple[Path, int, list[str]]
"""File and number of documents of a chunk, and its texts; no texts if the file exists."""
REMEMBERED_WORDS = 1 << 20
"""Words whose terms a building process caches: up to some 250 MB. Must exceed the words of a chunk."""


def build_index(
    texts: Iterable[str],
    folder: Path,
    *,
    processes: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Index texts into ``folder``; document i is the i-th text.

    After an interruption the same call resumes. An existing index stays usable until the new one replaces it.

    Args:
        texts: read once, in order, a chunk at a time.
        folder: new, empty, or with an index.
        on_progress: called with the number of documents analysed so far, after each chunk.

    Raises:
        SpearError: the folder has other contents, another process is building it, or a building process was killed.
    """
    if processes < 1:
        raise SpearError(f"processes={processes}: give at least 1.")
    folder = Path(folder).absolute()
    is_free = folder.is_dir() and (is_result(folder, FORMAT) or not any(folder.iterdir()))
    if folder.exists() and not is_free:
        raise SpearError(f"{folder} holds files that are not a search index: name another folder, or empty this one.")
    work = folder.with_name(f"{folder.name}.partial")
    with explain_build(f"the search index {folder}"), hold_folder(work):
        chunks = []
        documents = 0
        for path, size in map_in_order(index_chunk, _list_jobs(_cut_chunks(texts), work), processes):
            chunks.append(path)
            documents += size
            if on_progress is not None:
                on_progress(documents)
        # Merged beside the old index, which stays usable until the new one is complete.
        fresh = work / "index"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        merge_chunks([Chunk.open(path) for path in chunks], fresh)
        replace_folder(fresh, folder, work)
        shutil.rmtree(work)


def _cut_chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _list_jobs(chunks: Iterable[list[str]], work: Path) -> Iterator[Job]:
    for chunk in chunks:
        path = _name_chunk(chunk, work)
        yield path, len(chunk), [] if _is_complete(path) else chunk


def _name_chunk(chunk: list[str], work: Path) -> Path:
    # Named by its content and the version of the analysis: a chunk of another corpus or code is never taken for it.
    digest = hashlib.sha256(f"{VERSION}".encode())
    digest.update(array("q", map(len, chunk)).tobytes())
    digest.update("".join(chunk).encode("utf-8", "surrogatepass"))
    return work / f"{digest.hexdigest()}.chunk"


def index_chunk(job: Job) -> tuple[Path, int]:
    """Index a chunk; return the file and its number of documents."""
    path, size, chunk = job
    if chunk:
        write_chunk(make_postings(chunk, _recall_word), path)
    return path, size


_recall_word = remember_words(REMEMBERED_WORDS)


def _is_complete(path: Path) -> bool:
    """Return whether the chunk was written, by its checksum, since a crash of the system may truncate it."""
    try:
        return Chunk.open(path).is_whole()
    except (OSError, ValueError, KeyError, TypeError):
        return False
