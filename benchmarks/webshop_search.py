"""WebShop's search on 1.18 million products.

The texts are synthetic, with the term statistics of the real products (see `profile_texts.py`), since the full
catalogue cannot be shipped.

Times are CPU seconds; memory is what the kernel says in `smaps_rollup`. A finished index in --work is used again, an
unfinished one is finished.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.parts.profile_texts import TextMaker, read_profile
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_envs.bm25.build import build_index
from spear_envs.bm25.files import map_index
from spear_envs.bm25.index import SearchIndex, choose_rank, rank_with_numpy
from spear_envs.core.errors import SpearError

PRODUCTS = 1_180_000
MIB = 1 << 20
FURTHER_PROCESS = """
import sys
from pathlib import Path
from spear_envs.bm25.index import SearchIndex
index = SearchIndex.open(Path(sys.argv[1]))
for query in sys.stdin.readline().split("|"):
    index.search(query.strip())
print("ready", flush=True)
sys.stdin.readline()
"""


BARS = (
    Bar("building, on 2 cores and for 1.18 million", "min", at_most=15.0, size="standard"),
    Bar("building: memory of all processes at the peak", "MiB", at_most=4_096.0, size="standard"),
    Bar("opening and the first search, wall, median of 5", "ms", at_most=1_000.0, size="standard"),
    Bar("second process: unique memory, Python included", "MiB", at_most=60.0, size="standard"),
    Bar("search: mean", "ms", at_most=3.0, size="standard"),
    Bar("search: percentile 99", "ms", at_most=15.0, size="standard"),
    Bar("results that differ from the NumPy loop's", at_most=0.0),
    Bar("documents", at_least=1_180_000.0, size="standard"),
)
SIZES = {Size.QUICK: 50_000, Size.STANDARD: PRODUCTS, Size.FULL: PRODUCTS}


def read_cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def read_memory(pid: int | str, *fields: str) -> float:
    """Sum of fields of a process's ``smaps_rollup``, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sum(values[field] for field in fields) / 1024


def list_family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from list_family(int(child))


@contextmanager
def watch_memory() -> Iterator[list[float]]:
    """Memory of this process and its children in MiB, ten times a second; pages that they share count once."""
    samples: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            total = 0.0
            try:
                for pid in list_family(os.getpid()):
                    total += read_memory(pid, "Pss")
            except (OSError, KeyError):  # a child that has just ended
                continue
            samples.append(total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def measure_building(maker: TextMaker, products: int, folder: Path) -> Iterator[Figure]:
    """Build the index; the texts are made meanwhile, which is part of the time."""
    started, cpu = time.perf_counter(), read_cpu_seconds()
    width = len(f"{products:,}")

    def report(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done:{width},} of {products:,} products", end="", file=sys.stderr, flush=True)

    with watch_memory() as samples:
        build_index(maker.make_texts(products), folder, on_progress=report)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    minutes = (read_cpu_seconds() - cpu) / 60
    scale = products / PRODUCTS
    yield Figure("building, on 2 cores and for 1.18 million", minutes / 2 / scale, "min", note="CPU of all processes")
    yield Figure("building: wall, as the machine was", (time.perf_counter() - started) / 60, "min")
    yield Figure("building: memory of all processes at the peak", max(samples, default=0.0), "MiB")


def measure_opening(folder: Path) -> Iterator[Figure]:
    """Size and opening."""
    packed = map_index(folder)
    yield Figure("documents", len(packed.norms))
    yield Figure("distinct terms", len(packed.frequencies))
    yield Figure("postings", int(packed.frequencies.sum(dtype=np.int64)))
    yield Figure("files", sum(path.stat().st_size for path in folder.iterdir()) / MIB, "MiB")
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        SearchIndex.open(folder).search("black dress")
        rounds.append(time.perf_counter() - start)
    yield Figure("opening and the first search, wall, median of 5", 1e3 * sorted(rounds)[2], "ms")


def measure_memory(folder: Path, queries: list[str]) -> Iterator[Figure]:
    """Memory of a second process that has answered the same queries as the first, and of an idle Python."""
    line = " | ".join(queries) + "\n"
    command = [sys.executable, "-c", FURTHER_PROCESS, str(folder)]
    with ExitStack() as stack:
        workers = []
        for _ in range(2):
            pipe = subprocess.PIPE
            worker = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(line)
            worker.stdin.flush()
            assert worker.stdout.readline().strip() == "ready"
            workers.append(worker)
        unique = read_memory(workers[1].pid, "Private_Clean", "Private_Dirty")
        dirty = read_memory(workers[1].pid, "Private_Dirty")
        resident = read_memory(workers[1].pid, "Rss")
        for worker in workers:
            worker.communicate("\n")
    yield Figure("second process: unique memory, Python included", unique, "MiB")
    yield Figure("second process: of it written by itself", dirty, "MiB")
    yield Figure("second process: resident, shared pages included", resident, "MiB")


def measure_searches(folder: Path, queries: list[str]) -> Iterator[Figure]:
    """CPU time of searches, and whether NumPy's loop gives the same order."""
    index = SearchIndex.open(folder)
    for query in queries:  # so that what is measured is not the disk
        index.search(query)
    times = []
    for query in queries:
        start = time.thread_time()
        index.search(query)
        times.append(1e3 * (time.thread_time() - start))
    compiled = choose_rank() is not rank_with_numpy
    loop = "compiled loop" if compiled else "NumPy's loop"
    yield Figure("search: mean", mean(times), "ms", note=f"{loop}, {len(queries):,} queries")
    for percent in (50, 99, 100):
        yield Figure(f"search: percentile {percent}", float(np.percentile(times, percent)), "ms")
    if compiled:
        plain = SearchIndex(map_index(folder), rank_with_numpy)
        some = queries[:300]
        start = time.thread_time()
        expected = [plain.search(query) for query in some]
        taken = time.thread_time() - start
        yield Figure("search: mean", 1e3 * taken / len(some), "ms", "NumPy's loop")
        wrong = sum(index.search(query) != found for query, found in zip(some, expected, strict=True))
        yield Figure("results that differ from the NumPy loop's", wrong, note=f"of {len(some)}")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures; building only where there is no finished index."""
    products = options.products or SIZES[options.size]
    folder, maker = options.work / "index", TextMaker(read_profile("webshop"))
    queries = maker.make_queries(1 if options.size is Size.QUICK else 10)
    try:
        found = len(SearchIndex.open(folder))
    except SpearError:
        yield from measure_building(maker, products, folder)
    else:
        if found != products:
            raise SpearError(f"{folder} holds {found:,} documents, not {products:,}: name another folder")
    yield from measure_opening(folder)
    yield from measure_memory(folder, queries[:300])
    yield from measure_searches(folder, queries)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--products", type=int, help="size of the catalogue, instead of what the size says")
    return run_benchmark(measure, parser.parse_args(), BARS, ("numpy",))


if __name__ == "__main__":
    sys.exit(main())
