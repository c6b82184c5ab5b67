"""The vectors of a corpus on disk: shards of float16 with a journal, so that days of work survive a kill.

A shard holds the vectors of 2,000 lines. It is written under another name, renamed when it is on disk, and only then
entered in the journal with its checksum. A resumed build keeps the shards of the journal and encodes the rest, from the
same lines in the same batches and so to the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.data.files import digest_file, put_file
from spear_envs.data.processes import map_in_order
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.encoders import Encoder, OnnxEncoder, TorchEncoder
from spear_envs.retrieval.models import EncoderSpec

SHARD_ROWS = 2_000
JOURNAL = "journal.jsonl"
CPU_BATCH, GPU_BATCH = 32, 64
"""Passages encoded together. They are of nearly the same length, since padding costs time."""
DTYPE = np.dtype("<f2")


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
    entries = _read_journal(journal, _describe(corpus, source))
    starts = range(0, len(corpus), SHARD_ROWS)
    done = _find_done(folder, entries)
    if on_rows is not None:
        on_rows(min(len(done) * SHARD_ROWS, len(corpus)))

    def list_jobs() -> Iterator[_Job]:
        for start in starts[len(done) :]:
            yield _name_shard(folder, start), list(corpus.texts(start, start + SHARD_ROWS)), source

    fresh = journal.with_suffix(".part")
    fresh.write_text("".join(json.dumps(entry) + "\n" for entry in (_describe(corpus, source), *done)), "utf-8")
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


def _describe(corpus: Corpus, source: EncoderSource) -> dict[str, Any]:
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
