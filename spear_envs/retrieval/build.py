"""Building the parts of an index: postings of words, or vectors in a faiss index.

Everything is made under another name and renamed when it is complete. After an interruption the same command resumes:
finished chunks of postings and finished shards of vectors are kept.

A shard holds the vectors of 2,000 lines, in float16. It is written under another name, renamed when it is on disk, and
only then entered in the journal with its checksum. A resumed build keeps the shards of the journal and encodes the
rest, from the same lines in the same batches and so to the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.build import build_index
from spear_envs.core.errors import SpearError
from spear_envs.data.files import check_space, digest_file, put_file
from spear_envs.data.processes import explain_build, hold_folder, map_in_order, replace_folder
from spear_envs.data.progress import Show
from spear_envs.retrieval.corpus import EXACT, EXPORT, INDEX, POSTINGS, Corpus, Part, write_manifest
from spear_envs.retrieval.encoders import EXPORT_FILES, Encoder, EncoderSpec, OnnxEncoder, TorchEncoder, export_onnx
from spear_envs.retrieval.indexes import DenseIndex
from spear_envs.retrieval.vectors import EF_CONSTRUCTION, IndexType, choose_type, read_type, require_memory

COMPLETE = "complete"
"""File in a finished export with the fingerprint of its encoder."""
MARGIN = 2**26
"""Bytes of disk besides index and vectors."""
ADDED_ROWS = 1_000
"""Vectors added at once: in a large graph this takes seconds, so progress is visible."""
SHARD_ROWS = 2_000
JOURNAL = "journal.jsonl"
CPU_BATCH, GPU_BATCH = 32, 64
"""Passages encoded together. They are of nearly the same length, since padding costs time."""
DTYPE = np.dtype("<f2")


def _ignore(what: str, done: int, total: int | None) -> None:
    pass


def build_bm25(corpus: Corpus, index: Path, *, processes: int = 2, on_progress: Show = _ignore) -> None:
    """Build the part ``bm25`` of an index folder.

    Raises:
        SpearError: another process builds there, the disk is full, or a building process was killed.
    """
    folder = _prepare_folder(index) / Part.BM25.value
    folder.mkdir(exist_ok=True)
    build_index(
        corpus.texts(),
        folder / POSTINGS,
        processes=processes,
        on_progress=lambda documents: on_progress("index words", documents, len(corpus)),
    )
    files = [f"{POSTINGS}/{path.name}" for path in sorted((folder / POSTINGS).iterdir())]
    write_manifest(folder, Part.BM25, corpus, {}, {"built": _now()}, files)


@dataclass(frozen=True)
class EncoderSource:
    """Everything that a process needs to open an encoder."""

    folder: Path
    """Of the export if there is one, else of the model."""
    spec: EncoderSpec
    exported: bool
    device: str = "cpu"
    threads: int = 1

    def open(self) -> Encoder:
        """Open the encoder, once per process."""
        return _open_encoder(self)

    @property
    def batch(self) -> int:
        """Return the number of passages encoded together."""
        return CPU_BATCH if self.device == "cpu" else GPU_BATCH


@lru_cache(maxsize=1)
def _open_encoder(source: EncoderSource) -> Encoder:
    if source.exported:
        return OnnxEncoder(source.folder, source.spec, threads=source.threads)
    return TorchEncoder(source.folder, source.spec, device=source.device, threads=source.threads)


@dataclass(frozen=True)
class VectorFiles:
    """Vectors of all rows of a corpus, in shards."""

    paths: tuple[Path, ...]
    rows: int
    dimension: int

    def shards(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the vectors in order, a shard at a time: float32 (at most 2,000, D)."""
        for path in self.paths:
            yield np.fromfile(path, DTYPE).reshape(-1, self.dimension).astype(np.float32)

    def sample(self, size: int, seed: int) -> npt.NDArray[np.float32]:
        """Draw ``size`` vectors without replacement, in the order of their rows: float32 (size, D)."""
        rows = np.sort(np.random.default_rng(seed).choice(self.rows, size, replace=False))
        drawn = np.empty((size, self.dimension), np.float32)
        for number, path in enumerate(self.paths):
            first, last = np.searchsorted(rows, [number * SHARD_ROWS, (number + 1) * SHARD_ROWS])
            if first < last:
                mapped = np.memmap(path, DTYPE, "r").reshape(-1, self.dimension)
                drawn[first:last] = mapped[rows[first:last] - number * SHARD_ROWS]
        return drawn


def encode_corpus(
    corpus: Corpus,
    folder: Path,
    source: EncoderSource,
    *,
    processes: int = 1,
    on_rows: Callable[[int], None] | None = None,
) -> VectorFiles:
    """Encode the passages of a corpus that are not encoded yet.

    Memory is bounded by the texts of some windows of 2,000 lines and one encoder for each process.

    Args:
        folder: of the shards; one with some shards of the same corpus and encoder is resumed.
        processes: number of encoding processes; 1 encodes in the calling process.
        on_rows: called with the number of rows done, first with those of an earlier run.

    Raises:
        SpearError: the folder holds vectors of another corpus or encoder.
        BrokenProcessPool: a process was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / JOURNAL
    entries = _read_journal(journal, _describe_work(corpus, source))
    starts = range(0, len(corpus), SHARD_ROWS)
    done = _find_done(folder, entries)
    if on_rows is not None:
        on_rows(min(len(done) * SHARD_ROWS, len(corpus)))

    def list_jobs() -> Iterator[_Job]:
        for start in starts[len(done) :]:
            yield _name_shard(folder, start), list(corpus.texts(start, start + SHARD_ROWS)), source

    fresh = journal.with_suffix(".part")
    fresh.write_text("".join(json.dumps(entry) + "\n" for entry in (_describe_work(corpus, source), *done)), "utf-8")
    put_file(fresh, journal)
    with journal.open("a", encoding="utf-8") as file:
        for start, (digest, dimension) in zip(
            starts[len(done) :], map_in_order(_write_shard, list_jobs(), processes), strict=True
        ):
            rows = min(start + SHARD_ROWS, len(corpus)) - start
            entry = {"start": start, "rows": rows, "dimension": dimension, "sha256": digest}
            done.append(entry)
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if on_rows is not None:
                on_rows(start + rows)
    return VectorFiles(
        tuple(_name_shard(folder, start) for start in starts), len(corpus), int(done[0]["dimension"]) if done else 0
    )


_Job = tuple[Path, list[str], EncoderSource]


def _write_shard(job: _Job) -> tuple[str, int]:
    """Encode a window; return the checksum of the file and D."""
    path, texts, source = job
    encoder = source.open()
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    vectors = np.empty((len(texts), encoder.dimension), DTYPE)
    for first in range(0, len(order), source.batch):
        batch = order[first : first + source.batch]
        vectors[batch] = encoder.encode_passages([texts[row] for row in batch])
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(vectors.data)
    digest = digest_file(part)
    put_file(part, path)
    return digest, encoder.dimension


def _name_shard(folder: Path, start: int) -> Path:
    return folder / f"{start // SHARD_ROWS:06d}.f16"


def _describe_work(corpus: Corpus, source: EncoderSource) -> dict[str, Any]:
    """Return everything that the bytes of the shards depend on."""
    return {
        "corpus": corpus.fingerprint,
        "encoder": source.spec.fingerprint,
        "computed": "onnxruntime" if source.exported else f"torch {source.device}",
        "shard_rows": SHARD_ROWS,
        "batch": source.batch,
    }


def _read_journal(journal: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the finished shards; none without a journal."""
    try:
        lines = journal.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut off by a kill
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
    if not entries:
        return []
    if entries[0] != header:
        names = [name for name in header if entries[0].get(name) != header[name]]
        raise SpearError(
            f"{journal.parent} has vectors made with another {' and '.join(names)}: delete it, or name another folder."
        )
    return entries[1:]


def _find_done(folder: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the undamaged shards of the journal, up to the first damaged one."""
    done = []
    for number, entry in enumerate(entries):
        path = _name_shard(folder, number * SHARD_ROWS)
        if entry.get("start") != number * SHARD_ROWS or not path.is_file() or digest_file(path) != entry.get("sha256"):
            break
        done.append(entry)
    return done


@dataclass(frozen=True)
class DenseBuild:
    """How the part ``dense`` is built."""

    type: IndexType | None
    """None chooses one that suits the number of documents and fits into memory."""
    model: Path
    spec: EncoderSpec
    adopted: Path | None = None
    """An existing faiss index to use instead of building one."""
    device: str = "cpu"
    """Of torch; on the CPU the model's export for ONNX Runtime is used, if there is one."""
    processes: int = 2
    """For encoding; also threads for linking an HNSW graph."""
    memory: int | None = None
    """Bytes that may be used; by default nine tenths of what is free."""
    vectors: Path | None = None
    """Folder that keeps the vectors for builds of other types; by default they are deleted."""
    ef_construction: int = EF_CONSTRUCTION
    seed: int = 0
    """Of the sample for fitting codes and lists."""


def build_dense(corpus: Corpus, index: Path, build: DenseBuild, *, on_progress: Show = _ignore) -> None:
    """Build the part ``dense`` of an index folder, and check that passages find themselves in it.

    Raises:
        SpearError: the index would not fit into memory or on the disk, the kept vectors or the adopted index are of
            another corpus or model, another process builds there, or a building process was killed.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """
    folder = _prepare_folder(index) / Part.DENSE.value
    work = folder.with_name(f"{folder.name}.partial")
    with explain_build(str(folder), (OSError, RuntimeError)), hold_folder(work):
        reason, dimension = _prepare_export(build, work / EXPORT)
        fresh = work / "index" / Part.DENSE.value
        shutil.rmtree(fresh.parent, ignore_errors=True)
        fresh.mkdir(parents=True)
        if build.adopted is not None:
            kind = _adopt_index(build.adopted, fresh / INDEX)
        else:
            kind = (build.type or choose_type(len(corpus), dimension, build.memory)).resolve(len(corpus), dimension)
            require_memory(kind, len(corpus), dimension, build.memory)
            check_space(work, _find_disk(kind, len(corpus), dimension), f"the index {index}")
            vectors = _encode(corpus, build, work, bool(reason), on_progress)
            assemble_index(vectors, kind, fresh, build, on_progress=on_progress)
        files = [INDEX, *([EXACT] if kind.needs_exact else [])]
        if not reason:
            shutil.copytree(work / EXPORT, fresh / EXPORT, ignore=shutil.ignore_patterns(COMPLETE))
            files += [f"{EXPORT}/{name}" for name in EXPORT_FILES]
        settings = {
            "type": kind.name,
            "dimension": dimension,
            "metric": "inner product",
            "ef_construction": None if build.adopted else build.ef_construction,
            "seed": None if build.adopted else build.seed,
            "encoder": asdict(build.spec),
        }
        notes = {"built": _now(), "model_folder": str(build.model), "device": build.device, "no_export": reason}
        write_manifest(fresh, Part.DENSE, corpus, settings, notes, files)
        DenseIndex(corpus, fresh.parent)
        replace_folder(fresh, folder, work)
        shutil.rmtree(work)


def _encode(corpus: Corpus, build: DenseBuild, work: Path, by_torch: bool, on_progress: Show) -> VectorFiles:
    if by_torch or build.device != "cpu":
        source = EncoderSource(build.model, build.spec, exported=False, device=build.device)
    else:
        source = EncoderSource(work / EXPORT, build.spec, exported=True)
    return encode_corpus(
        corpus,
        build.vectors or work / "vectors",
        source,
        processes=build.processes if build.device == "cpu" else 1,
        on_rows=lambda rows: on_progress("encode", rows, len(corpus)),
    )


def _adopt_index(path: Path, target: Path) -> IndexType:
    """Link a faiss index into place, since the disk may only have room for one copy."""
    path = path.absolute()
    kind = read_type(path)
    if kind.needs_exact:
        raise SpearError(f"{path} is of type {kind.name}, which also needs the exact vectors: build one instead.")
    try:
        os.link(path, target)
    except OSError:  # on another file system
        target.symlink_to(path)
    return kind


def assemble_index(
    vectors: VectorFiles, kind: IndexType, folder: Path, build: DenseBuild, *, on_progress: Show = _ignore
) -> None:
    """Make the faiss index of finished vectors in ``folder``; memory has the index, a shard and a training sample."""
    import faiss

    faiss.omp_set_num_threads(build.processes)
    index = kind.make(vectors.dimension, build.ef_construction)
    kind.reserve(index, vectors.rows)
    if size := kind.training_vectors(vectors.rows):
        on_progress("train", 0, vectors.rows)
        index.train(vectors.sample(size, build.seed))
    for shard in vectors.shards():
        for part in np.array_split(shard, max(len(shard) // ADDED_ROWS, 1)):
            index.add(part)
            on_progress("add", index.ntotal, vectors.rows)
    on_progress("write", 0, vectors.rows)
    faiss.write_index(index, str(folder / INDEX))
    if kind.needs_exact:
        with (folder / EXACT).open("wb") as file:
            for path in vectors.paths:
                with path.open("rb") as shard_file:
                    shutil.copyfileobj(shard_file, file)
    on_progress("write", vectors.rows, vectors.rows)


def _prepare_export(build: DenseBuild, folder: Path) -> tuple[str, int]:
    """Make the export for ONNX Runtime, or find an earlier one.

    Returns:
        Why there is none (or an empty string), and the dimension of the vectors.
    """
    mark = folder / COMPLETE
    if mark.is_file() and mark.read_text("utf-8") == build.spec.fingerprint:
        return "", EncoderSource(folder, build.spec, exported=True).open().dimension
    # In a separate process, since torch would keep half a gigabyte for the rest of the build.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        reason, dimension = pool.submit(_export_model, build, folder).result()
    if not reason:
        mark.write_text(build.spec.fingerprint, "utf-8")
    return reason, dimension


def _export_model(build: DenseBuild, folder: Path) -> tuple[str, int]:
    encoder = TorchEncoder(build.model, build.spec)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        export_onnx(encoder, folder)
    except SpearError as error:
        return str(error), encoder.dimension
    return "", encoder.dimension


def _prepare_folder(index: Path) -> Path:
    index = Path(index).absolute()
    try:
        index.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise SpearError(f"{index} is a file: name a folder for the index.") from None
    strangers = sorted(path.name for path in index.iterdir() if path.name.partition(".")[0] not in _OWN)
    if strangers:
        raise SpearError(f"{index} has files that are not an index ({strangers[0]} …): name another folder.")
    return index


_OWN = {part.value for part in Part}


def _find_disk(kind: IndexType, rows: int, dimension: int) -> int:
    vectors = 2 * dimension * rows
    return round(kind.index_bytes(rows, dimension)) + vectors * (2 if kind.needs_exact else 1) + MARGIN


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
