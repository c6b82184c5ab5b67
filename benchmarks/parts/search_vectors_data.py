"""Vectors for the benchmark of vector indexes: real ones of passages and questions, and mixtures of the former.

Random vectors would be not a test: nothing is near anything. A mixture ``w a + (1 - w) b`` of the vectors of two random
passages, with ``w`` even between 0 and 1, and brought to length 1, lies where passages lie. Many are near-duplicates of
passages, which makes it harder to find the very nearest than it is among as many real passages.
"""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spear_envs.retrieval.build import SHARD_ROWS, DenseBuild, VectorFiles, assemble_index
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.encoders import MINILM, describe_model, find_model
from spear_envs.retrieval.vectors import parse_type

__all__ = ["BuildCost", "build_index", "open_passages", "read_questions", "write_mixtures"]

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data" / "qa"
PASSAGES = ("kilt_passages", "2wiki_passages")
SEED = 0


def open_passages(path: Path, limit: int | None) -> Corpus:
    """The passages of the folder ``shared`` beside the checkout, if it is there, else of the embedded base.

    Args:
        path: the file that they are written to.
        limit: how many at most.
    """
    with path.open("w", encoding="utf-8") as file:
        for document in islice(_read_passages(), limit):
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return Corpus.open(path)


def _read_passages() -> Iterator[dict[str, str]]:
    if SHARED.is_dir():
        for name in PASSAGES:
            with lzma.open(SHARED / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
                for document in map(json.loads, file):
                    # Both files number theirs from 0.
                    yield {"id": f"{name}/{document['id']}", "contents": document["contents"]}
    else:
        from spear_envs.search.embedded import open_base

        yield from open_base().corpus


def read_questions(limit: int | None) -> list[str]:
    """Questions of the seven benchmarks, or of the embedded base where that folder is not."""
    if SHARED.is_dir():
        with lzma.open(SHARED / "seven_benchmarks.jsonl.xz", "rt", encoding="utf-8") as file:
            questions = [json.loads(line)["question"] for line in file]
    else:
        from spear_envs.search.embedded import open_base

        questions = [question.question for group in open_base().questions.values() for question in group]
    # Spread over the file, which has one benchmark after the other.
    return questions if limit is None else questions[:: max(len(questions) // limit, 1)][:limit]


def write_mixtures(real: npt.NDArray[np.float32], rows: int, folder: Path) -> VectorFiles:
    """Shards of ``rows`` vectors as a build writes them: the real ones, then mixtures of two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, rows, SHARD_ROWS):
        rng = np.random.default_rng([SEED, start])
        size = min(SHARD_ROWS, rows - start)
        first, second = real[rng.integers(0, len(real), (2, size))]
        weight = rng.random((size, 1), np.float32)
        mixed = weight * first + (1 - weight) * second
        mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
        known = real[start : start + size]
        mixed[: len(known)] = known
        paths.append(folder / f"{start // SHARD_ROWS:06d}.f16")
        mixed.astype("<f2").tofile(paths[-1])
    return VectorFiles(tuple(paths), rows, real.shape[1])


@dataclass(frozen=True)
class BuildCost:
    """Cost of building an index from finished vectors, in a process of its own with one thread."""

    cpu_seconds: float
    peak_bytes: int
    """Greatest resident memory of the process, with Python and faiss."""
    index_bytes: int


def build_index(vectors: VectorFiles, kind: str, folder: Path) -> BuildCost:
    """Build as ``spear index build`` does once the vectors are there; prints where it is now and then."""
    folder.mkdir(parents=True, exist_ok=True)
    model = find_model(MINILM)
    resolved = parse_type(kind).resolve(vectors.rows, vectors.dimension)
    build = DenseBuild(type=resolved, model=model, spec=describe_model(model), processes=1)
    said, start = time.monotonic(), time.process_time()

    def say(what: str, done: int, total: int | None) -> None:
        nonlocal said
        if time.monotonic() > said + 60:
            said = time.monotonic()
            seconds = time.process_time() - start
            print(f"  {kind}, {what}: {done:,} of {total or 0:,}, {seconds:,.0f} s of CPU", flush=True)

    assemble_index(vectors, resolved, folder, build, on_progress=say)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return BuildCost(time.process_time() - start, peak, (folder / "index.faiss").stat().st_size)
