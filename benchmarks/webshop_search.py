"""WebShop's search on a catalogue of 1.18 million products: building, opening, memory and time of a query.

The texts are synthetic, with the term statistics of the real products (see `_webshop_texts.py`), since the full
catalogue cannot be shipped. The original is Lucene behind a JVM; its figures, in brackets, are the ones that were
measured or reported for it elsewhere, not in this run.

    python -m benchmarks.webshop_search [--products N] [--folder DIR] [--rounds N] [--json FILE]

Times are CPU seconds; memory is what the kernel says in `smaps_rollup`. A finished index in --folder is used again, an
unfinished one is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks._webshop_texts import TextMaker, read_profile
from spear_envs.bm25.build import build_index
from spear_envs.bm25.files import map_postings
from spear_envs.bm25.index import SearchIndex
from spear_envs.bm25.ranking import choose_rank, rank_with_numpy
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


@dataclass(frozen=True)
class Figure:
    """One measurement; ``bar`` is the greatest value that holds."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    original: str = ""
    """What is known of the original."""

    @property
    def held(self) -> bool:
        """Whether the bar holds."""
        return self.bar is None or self.value <= self.bar


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
    original = f"Lucene {52 * products / 100_000 / 60:.2g} min wall"
    yield Figure("building: CPU of all processes, on 2 cores", minutes / 2, "min", 15 * scale, original)
    yield Figure("building: wall, as the machine was", (time.perf_counter() - started) / 60, "min")
    yield Figure("building: memory of all processes at the peak", max(samples, default=0.0), "MiB", 4_096)


def measure_opening(folder: Path) -> Iterator[Figure]:
    """Size and opening."""
    postings = map_postings(folder)
    yield Figure("documents", len(postings.norms), "")
    yield Figure("distinct terms", len(postings.starts) - 1, "")
    yield Figure("postings", len(postings.documents), "")
    yield Figure("files", sum(path.stat().st_size for path in folder.iterdir()) / MIB, "MiB")
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        SearchIndex.open(folder).search("black dress")
        rounds.append(time.perf_counter() - start)
    yield Figure("opening and the first search, wall, median of 5", 1e3 * sorted(rounds)[2], "ms", 1_000, "30-90 s")


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
    yield Figure("second process: unique memory, Python included", unique, "MiB", 60, "12-15 GB")
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
    loop = "compiled" if compiled else "NumPy"
    yield Figure(f"search, {loop} loop: mean of {len(queries):,}", mean(times), "ms", 3.0, "not run")
    for percent, bar in ((50, None), (99, 15.0), (100, None)):
        yield Figure(f"search, {loop} loop: percentile {percent}", float(np.percentile(times, percent)), "ms", bar)
    if compiled:
        plain = SearchIndex(map_postings(folder), rank_with_numpy)
        some = queries[:300]
        start = time.thread_time()
        expected = [plain.search(query) for query in some]
        taken = time.thread_time() - start
        yield Figure(f"search, NumPy loop: mean of {len(some)}", 1e3 * taken / len(some), "ms")
        wrong = sum(index.search(query) != found for query, found in zip(some, expected, strict=True))
        yield Figure(f"differing results in {len(some)} queries", wrong, "", 0)


def main() -> int:
    """Measure, print a table, and write it as JSON where asked; exit code 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, default=PRODUCTS, help=f"size of the catalogue (default {PRODUCTS:,})")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the index is kept (default: thrown away)")
    parser.add_argument("--rounds", type=int, default=10, help="times 300 queries (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} CPUs")
    maker = TextMaker(read_profile())
    queries = maker.make_queries(options.rounds)
    figures = []
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "index"
        sections = [measure_opening(folder), measure_memory(folder, queries[:300]), measure_searches(folder, queries)]
        try:
            found = len(SearchIndex.open(folder))
        except SpearError:
            sections.insert(0, measure_building(maker, options.products, folder))
        else:
            if found != options.products:
                parser.error(f"{folder} holds {found:,} documents, not {options.products:,}: name another folder")
        for section in sections:
            for figure in section:
                bar = "" if figure.bar is None else f"  bar <= {figure.bar:,.4g} {figure.unit}"
                verdict = "" if figure.bar is None else "  held" if figure.held else "  NOT HELD"
                original = f"  [original: {figure.original}]" if figure.original else ""
                value = f"{figure.value:,.0f}" if figure.value >= 1_000 else f"{figure.value:.4g}"
                print(f"{figure.name:52} {value:>12} {figure.unit:4}{bar}{verdict}{original}", flush=True)
                figures.append(figure)
    if options.json is not None:
        rows = [{**asdict(figure), "held": figure.held} for figure in figures]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure.held for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
