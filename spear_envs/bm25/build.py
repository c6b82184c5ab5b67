"""Building an index on disk: chunks of documents are analysed by several processes, then merged.

Everything is made in a folder next to the index, ``<name>.partial``, and moved into place when it is complete. A chunk
is a file named after the SHA-256 of its texts, so an interrupted build finds its finished chunks again unless the texts
have changed. Memory is bounded by the texts of a few chunks, or by a stretch of the merge.
"""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spear_envs.bm25.analysis import remember_words
from spear_envs.bm25.chunks import MAX_DOCUMENTS, Chunk, write_chunk
from spear_envs.bm25.files import MANIFEST, VERSION
from spear_envs.bm25.merging import merge_chunks
from spear_envs.bm25.postings import make_postings
from spear_envs.core.errors import SpearError
from spear_envs.data.processes import explain_build, hold_folder, map_in_order, replace_folder

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
    is_free = folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir()))
    if folder.exists() and not is_free:
        raise SpearError(f"{folder} holds files that are not a search index: name another folder, or empty this one.")
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
    digest = hashlib.sha256(f"{VERSION}".encode())
    digest.update(array("q", map(len, chunk)).tobytes())
    digest.update("".join(chunk).encode("utf-8", "surrogatepass"))
    return work / f"{digest.hexdigest()}.chunk"


def _write_chunk(job: Job) -> tuple[Path, int]:
    """Index a chunk; return the file and its number of documents."""
    path, size, chunk = job
    if chunk:
        write_chunk(make_postings(chunk, _recall_word), path)
    return path, size


_recall_word = remember_words(REMEMBERED_WORDS)


def _is_complete(path: Path) -> bool:
    """Whether the chunk was written, by its checksum, since a crash of the system may truncate it."""
    try:
        return Chunk.open(path).is_whole()
    except (OSError, ValueError, KeyError, TypeError):
        return False
