"""Building the parts of an index: postings of words, or vectors in a faiss index.

Everything is made under another name and renamed when it is complete. After an interruption the same command resumes:
finished chunks of postings and finished shards of vectors are kept.

A shard holds the vectors of 2,000 lines, in float16. It is written under another name and renamed when it is on disk;
its name has its checksum. A resumed build keeps the sound shards and encodes the rest, from the same lines in the same
batches and so to the same bytes.
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

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.build import build_index
from spear_envs.core.errors import SpearError
from spear_envs.data.files import check_space, digest_file, put_file, write_json
from spear_envs.data.processes import explain_build, hold_folder, map_in_order, replace_folder
from spear_envs.data.progress import Show
from spear_envs.retrieval.corpus import EXACT, EXPORT, INDEX, POSTINGS, Corpus, Part, finish_part
from spear_envs.retrieval.encoders import EXPORT_FILES, Encoder, EncoderSpec, OnnxEncoder, TorchEncoder, export_onnx
from spear_envs.retrieval.indexes import DenseIndex
from spear_envs.retrieval.vectors import (
    EF_CONSTRUCTION,
    IndexType,
    choose_type,
    estimate_index,
    read_type,
    require_memory,
)

COMPLETE = "complete"
"""File in a finished export with the fingerprint of its encoder."""
MARGIN = 2**26
"""Bytes of disk besides index and vectors."""
ADDED_ROWS = 1_000
"""Vectors added at once: in a large graph this takes seconds, so progress is visible."""
SHARD_ROWS = 2_000
NOTE = "made_of.json"
"""File in a folder of shards that says what they were made of."""
DIGITS = 16
"""Hex digits of SHA-256 in the name of a shard."""
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
    with hold_folder(folder):  # until the manifest is of these postings
        build_index(
            corpus.texts(),
            folder / POSTINGS,
            processes=processes,
            on_progress=lambda documents: on_progress("index words", documents, len(corpus)),
        )
        files = [f"{POSTINGS}/{path.name}" for path in sorted((folder / POSTINGS).iterdir())]
        finish_part(folder, Part.BM25, corpus, {}, {"built": _now()}, files)


@dataclass(frozen=True)
class EncoderSource:
    """Everything that a process needs to open an encoder."""

    folder: Path
    """Folder of the export if there is one, otherwise of the model."""
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
        SpearError: the folder holds vectors of another corpus or encoder, or another process writes there.
        BrokenProcessPool: a process was killed.
    """
    with hold_folder(folder):  # builds of several types may share it
        return _encode_rest(corpus, folder, source, processes, on_rows)


def _encode_rest(
    corpus: Corpus, folder: Path, source: EncoderSource, processes: int, on_rows: Callable[[int], None] | None
) -> VectorFiles:
    _claim_folder(folder, corpus, source)
    starts = range(0, len(corpus), SHARD_ROWS)
    done: list[Path] = []
    while len(done) < len(starts) and (path := _find_shard(folder, len(done))):
        done.append(path)
    if on_rows is not None:
        on_rows(min(len(done) * SHARD_ROWS, len(corpus)))

    def list_jobs(first: int) -> Iterator[ShardJob]:
        for number in range(first, len(starts)):
            yield folder, number, list(corpus.texts(starts[number], starts[number] + SHARD_ROWS)), source

    for path in map_in_order(write_shard, list_jobs(len(done)), processes):
        done.append(path)
        if on_rows is not None:
            on_rows(min(len(done) * SHARD_ROWS, len(corpus)))
    width = done[0].stat().st_size // (DTYPE.itemsize * min(SHARD_ROWS, len(corpus))) if done else 0
    return VectorFiles(tuple(done), len(corpus), width)


ShardJob = tuple[Path, int, list[str], EncoderSource]


def write_shard(job: ShardJob) -> Path:
    """Encode a window; the name of its file has the number and the checksum."""
    folder, number, texts, source = job
    encoder = source.open()
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    vectors = np.empty((len(texts), encoder.dimension), DTYPE)
    for first in range(0, len(order), source.batch):
        batch = order[first : first + source.batch]
        vectors[batch] = encoder.encode_passages([texts[row] for row in batch])
    part = folder / f"{number:06d}.part"
    with part.open("wb") as file:
        file.write(vectors.data)
    path = folder / f"{number:06d}.{digest_file(part)[:DIGITS]}.f16"
    put_file(part, path)
    return path


def _find_shard(folder: Path, number: int) -> Path | None:
    """Find an undamaged shard; delete damaged ones."""
    for path in folder.glob(f"{number:06d}.{'?' * DIGITS}.f16"):
        if path.name.split(".")[1] == digest_file(path)[:DIGITS]:
            return path
        path.unlink()
    return None


def _claim_folder(folder: Path, corpus: Corpus, source: EncoderSource) -> None:
    """Note in a folder everything that the bytes of its shards depend on, or compare it with an earlier note."""
    note = {
        "corpus": corpus.fingerprint,
        "encoder": source.spec.fingerprint,
        "computed": "onnxruntime" if source.exported else f"torch {source.device}",
        "shard_rows": SHARD_ROWS,
        "batch": source.batch,
    }
    try:
        found = json.loads((folder / NOTE).read_text("utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):  # shards of unknown origin are made again
        for path in folder.glob(f"??????.{'?' * DIGITS}.f16"):
            path.unlink()
        write_json(folder / NOTE, note)
    elif found != note:
        names = [name for name in note if found.get(name) != note[name]]
        raise SpearError(
            f"{folder} has vectors made with another {' and '.join(names)}: delete it, or name another folder."
        )


@dataclass(frozen=True)
class DenseBuild:
    """How the part ``dense`` is built."""

    type: IndexType | None
    """Type of the index; None chooses one that suits the number of documents and fits into memory."""
    model: Path
    spec: EncoderSpec
    adopted: Path | None = None
    """An existing faiss index to use instead of building one."""
    device: str = "cpu"
    """Device of torch; on the CPU the model's export for ONNX Runtime is used, if there is one."""
    processes: int = 2
    """Processes that encode; also the number of threads that link an HNSW graph."""
    memory: int | None = None
    """Bytes that the build may use; by default nine tenths of what is free."""
    vectors: Path | None = None
    """Folder that keeps the vectors for builds of other types; by default they are deleted."""
    ef_construction: int = EF_CONSTRUCTION
    seed: int = 0
    """Seed of the sample to which codes and lists are fitted."""


def build_dense(corpus: Corpus, index: Path, build: DenseBuild, *, on_progress: Show = _ignore) -> None:
    """Build the part ``dense`` of an index folder, and check that passages find themselves in it.

    Raises:
        SpearError: the index would not fit into memory or on the disk, the kept vectors or the adopted index are of
            another corpus or model, another process builds there, or a building process was killed.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """
    if build.vectors is not None and build.vectors.resolve().is_relative_to(index.resolve()):
        raise SpearError(f"the vectors {build.vectors} are in the index {index}: only another folder can keep them.")
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
            needed = estimate_index(kind, len(corpus), dimension).disk_bytes + MARGIN
            check_space(work, needed, f"the index {index}")
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
        finish_part(fresh, Part.DENSE, corpus, settings, notes, files)
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
    whole = path.resolve()  # a hard link to a link, such as those in the cache of Hugging Face, would lead nowhere
    try:
        os.link(whole, target)
    except OSError:  # on another file system
        target.symlink_to(whole)
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


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
