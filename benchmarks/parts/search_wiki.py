"""BM25 over as many passages as wiki-18 has: synthetic ones with the term statistics of Wikipedia's.

Terms occur together by article and theme, and each question is about a passage (`profile_texts.py`).

The index is built in a process of its own, which is killed on the way and started again. Making the texts is part of
it, and taken out of the CPU time. Run as a script, this module is that process.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.parts.profile_texts import PASSAGE_TAILS, Kin, TextMaker, read_profile
from benchmarks.runner.figures import Figure
from spear_envs.bm25.build import build_index
from spear_envs.bm25.files import MANIFEST
from spear_envs.bm25.index import SearchIndex

__all__ = ["measure_wiki"]

ROOT = Path(__file__).resolve().parents[2]
RARE_TERMS = 4_000_000
TOPK = 3
NAME = "21 million passages"


@dataclass(frozen=True)
class BuildCost:
    """Cost of a build, all its processes together."""

    cpu_seconds: float
    """Without making the texts."""
    peak_bytes: int
    """Greatest resident memory of a process, the words of the texts' maker included."""
    kept: int
    """Documents that the second process found finished."""


def make_maker() -> TextMaker:
    """Draws passages and questions."""
    return TextMaker(read_profile("search"), RARE_TERMS, PASSAGE_TAILS, Kin())


def build_interrupted(folder: Path, passages: int) -> BuildCost:
    """Build the index of so many passages, killed with SIGKILL once it has a quarter of them, and resumed."""
    cpu_seconds, peak, kept = 0.0, 0, 0
    for stop in (passages // 4, None):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "benchmarks.parts.search_wiki", str(folder), str(passages)]
        said = {"making": 0.0}
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                print(f"  {line.strip()}", flush=True)
                if stop is not None and said["documents"] >= stop:
                    kept = int(said["documents"])
                    process.send_signal(signal.SIGKILL)
                    break
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - said["making"]
        peak = after.ru_maxrss * 1024
    if process.returncode:
        raise RuntimeError(f"the build ended with code {process.returncode}")
    return BuildCost(cpu_seconds, peak, kept)


def measure_wiki(work: Path, passages: int) -> Iterator[Figure]:
    """Build an index of so many passages, interrupted once, and search it; one that ``work`` holds is only searched."""
    folder = work / "wiki"
    if not (folder / MANIFEST).is_file():
        cost, count = build_interrupted(folder, passages), f"{passages:,} passages"
        yield Figure(
            f"{NAME}: built", cost.cpu_seconds / 60, "CPU min", note=f"{count}; killed at {cost.kept:,}, resumed"
        )
        yield Figure(
            f"{NAME}: memory of the build at its peak", cost.peak_bytes / 1e9, "GB", note="texts' maker included"
        )
    yield Figure(f"{NAME}: index", sum(path.stat().st_size for path in folder.iterdir()) / 1e9, "GB")
    index, queries = SearchIndex.open(folder), make_maker().make_queries(1)
    times = []
    for again in (False, True):
        for query in queries:
            start = time.thread_time()
            index.search(query, TOPK)
            if again:  # so that what is measured is not the disk
                times.append(1e3 * (time.thread_time() - start))
    note = f"{len(queries):,} questions, {len(index):,} passages"
    yield Figure(f"{NAME}: a query, top 3", float(np.mean(times)), "CPU ms", note=note)
    for percent in (50, 99):
        yield Figure(f"{NAME}: a query, percentile {percent}", float(np.percentile(times, percent)), "CPU ms")


def main() -> None:
    """Build, and tell how far it is after each chunk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("passages", type=int)
    options = parser.parse_args()
    making = time.process_time()
    maker = make_maker()
    made = maker.make_texts(options.passages)
    making = time.process_time() - making

    def make_texts() -> Iterator[str]:
        nonlocal making
        while True:
            start = time.thread_time()
            texts = [text for _, text in zip(range(1_024), made, strict=False)]
            making += time.thread_time() - start
            if not texts:
                return
            yield from texts

    def report(documents: int) -> None:
        print(json.dumps({"documents": documents, "making": making, "cpu": time.process_time()}), flush=True)

    build_index(make_texts(), options.folder, processes=1, on_progress=report)
    print(json.dumps({"documents": options.passages, "making": making, "cpu": time.process_time()}), flush=True)


if __name__ == "__main__":
    main()
