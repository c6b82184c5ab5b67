"""Building an index on disk: chunks of documents are analysed by several processes, then merged.

Everything is made in a folder beside the index, ``<name>.partial``, and moved to its place when it is complete. A chunk
is a file named after the SHA-256 of its texts: a build that was interrupted finds its finished chunks again, and takes
none for texts that have changed since. Memory is bounded by the texts of a few chunks, the vocabulary, and what the
system keeps of the mapped output.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.analysis import remember_words
from spear_envs.bm25.files import ARRAYS, MANIFEST, VERSION, name_file, write_array, write_manifest
from spear_envs.bm25.postings import Postings, make_postings, pack_terms, unpack_terms
from spear_envs.core.errors import SpearError
from spear_envs.data.processes import explain_build, hold_folder, map_in_order, replace_folder

__all__ = ["build_index"]

CHUNK_DOCUMENTS = 1 << 14
CHUNK_CHARACTERS = 1 << 24
Job = tuple[Path, int, list[str]]
"""File and number of documents of a chunk, and its texts; no texts if the file is there already."""
REMEMBERED_WORDS = 1 << 18
"""Words whose terms a building process keeps: up to some 80 MB."""


def build_index(
    texts: Iterable[str],
    folder: Path,
    *,
    processes: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Index texts into ``folder``; document i is the i-th text.

    Run again after an interruption with the same texts, it goes on where it was. An index that is already in the folder
    stays in use until the new one takes its place.

    Args:
        texts: read once, in order, a chunk at a time.
        folder: a folder that does not exist yet, is empty, or holds an index.
        processes: that analyse beside the calling one; 1 does everything in the calling process.
        on_progress: called with the number of documents analysed so far, after each chunk.

    Raises:
        SpearError: the folder holds something else, another process is building it, or a building process was killed.
    """
    if processes < 1:
        raise SpearError(f"processes={processes}: give at least 1.")
    folder = Path(folder).absolute()
    if folder.exists() and not _may_replace(folder):
        raise SpearError(f"{folder} holds files that are no search index: name another folder, or empty this one.")
    work = folder.with_name(f"{folder.name}.partial")
    with explain_build(f"the search index {folder}"), hold_folder(work):
        chunks = []
        documents = 0
        for path, size in map_in_order(_write_chunk, _list_jobs(_cut_chunks(texts), work), processes):
            chunks.append(path)
            documents += size
            if on_progress is not None:
                on_progress(documents)
        fresh = work / "index"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _merge_chunks(chunks, fresh)
        replace_folder(fresh, folder, work)
        shutil.rmtree(work)


def _may_replace(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir()))


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
    digest = hashlib.sha256(f"{VERSION}".encode())
    digest.update(array("q", map(len, chunk)).tobytes())
    digest.update("".join(chunk).encode("utf-8", "surrogatepass"))
    return work / f"{digest.hexdigest()}.npz"


def _write_chunk(job: Job) -> tuple[Path, int]:
    """Index a chunk into a file that is there either wholly or not at all; returns the file and its documents."""
    path, size, chunk = job
    if chunk:
        part = path.with_suffix(f".{os.getpid()}")  # two chunks of equal texts have one name
        with part.open("wb") as file:
            np.savez(file, **asdict(make_postings(chunk, _recall_word)))
        part.replace(path)
    return path, size


_recall_word = remember_words(REMEMBERED_WORDS)


def _read_chunk(path: Path) -> Postings:
    with np.load(path) as arrays:
        return Postings(
            **{name: arrays[name] for name in ARRAYS},
            terms_total=int(arrays["terms_total"]),
            filled=int(arrays["filled"]),
        )


def _is_complete(path: Path) -> bool:
    """Whether the chunk was written; its checksums are compared, since a crash of the system can leave less."""
    try:
        _read_chunk(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return False
    return True


def _merge_chunks(chunks: list[Path], folder: Path) -> None:
    """Write the index of all chunks, whose documents follow one another."""
    numbers, term_bytes, term_ends = _number_terms(chunks)
    write_array(folder, "term_bytes", term_bytes)
    write_array(folder, "term_ends", term_ends)
    frequencies = np.zeros(len(numbers), np.int64)
    norms, terms_total, filled = [], 0, 0
    ranks = []
    for path in chunks:
        chunk = _read_chunk(path)
        terms = unpack_terms(chunk.term_bytes, chunk.term_ends)
        ranks.append(np.fromiter(map(numbers.__getitem__, terms), np.uint32, len(terms)))
        frequencies[ranks[-1]] += np.diff(chunk.starts)
        norms.append(chunk.norms)
        terms_total += chunk.terms_total
        filled += chunk.filled
    del numbers
    starts = np.concatenate([[0], np.cumsum(frequencies)]).astype(np.int64)
    write_array(folder, "starts", starts)
    write_array(folder, "norms", np.concatenate([np.empty(0, np.uint8), *norms]))
    _merge_pairs(chunks, ranks, starts, folder)
    write_manifest(folder, terms_total, filled)


def _number_terms(chunks: list[Path]) -> tuple[dict[bytes, int], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All terms with their numbers in ascending order, and packed."""
    known: set[bytes] = set()
    for path in chunks:
        with np.load(path) as arrays:
            known.update(unpack_terms(arrays["term_bytes"], arrays["term_ends"]))
    terms = sorted(known)
    return {term: number for number, term in enumerate(terms)}, *pack_terms(terms)


def _merge_pairs(
    chunks: list[Path], ranks: list[npt.NDArray[np.uint32]], starts: npt.NDArray[np.int64], folder: Path
) -> None:
    """Write documents and counts: the pairs of a term, chunk after chunk."""
    total = int(starts[-1])
    if not total:
        write_array(folder, "documents", np.empty(0))
        write_array(folder, "counts", np.empty(0))
        return
    documents = _map_new(folder, "documents", total)
    counts = _map_new(folder, "counts", total)
    places = starts[:-1].copy()
    first = 0
    for path, rank in zip(chunks, ranks, strict=True):
        chunk = _read_chunk(path)
        sizes = np.diff(chunk.starts)
        targets = np.repeat(places[rank] - chunk.starts[:-1], sizes) + np.arange(len(chunk.documents))
        documents[targets] = chunk.documents + np.uint32(first)
        counts[targets] = chunk.counts
        places[rank] += sizes
        first += len(chunk.norms)
    documents.flush()
    counts.flush()


def _map_new(folder: Path, name: str, size: int) -> np.memmap[Any, Any]:
    path = folder / name_file(name)
    dtype = np.dtype(ARRAYS[name])
    with path.open("wb") as file:
        # Writing to a mapped file that finds no room kills the process; this raises OSError.
        os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    return np.memmap(path, dtype, "r+", shape=(size,))
