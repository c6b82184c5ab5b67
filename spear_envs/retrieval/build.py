"""Building the parts of an index: postings of words, or vectors in a faiss index.

Everything is made under another name and renamed when it is complete. After an interruption the same command resumes:
finished chunks of postings and finished shards of vectors are kept.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from spear_envs.bm25.build import build_index
from spear_envs.core.errors import SpearError
from spear_envs.data.files import check_space
from spear_envs.data.processes import explain_build, hold_folder, replace_folder
from spear_envs.data.progress import Show
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.dense import DenseRetriever
from spear_envs.retrieval.encoders import EXPORT_FILES, TorchEncoder, export_onnx
from spear_envs.retrieval.kinds import EF_CONSTRUCTION, IndexType
from spear_envs.retrieval.manifest import EXACT, EXPORT, INDEX, POSTINGS, Part, write_manifest
from spear_envs.retrieval.models import EncoderSpec
from spear_envs.retrieval.plan import choose_type, require_memory
from spear_envs.retrieval.vector_index import read_type
from spear_envs.retrieval.vectors import EncoderSource, VectorFiles, encode_corpus

COMPLETE = "complete"
"""File in a finished export with the fingerprint of its encoder."""
MARGIN = 2**26
"""Bytes of disk besides index and vectors."""
ADDED_ROWS = 1_000
"""Vectors added at once: in a large graph this takes seconds, so progress is visible."""


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
        DenseRetriever(corpus, fresh.parent)
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
