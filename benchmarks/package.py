"""Import, start of the command, and the fast tests."""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark

BARS = (
    Bar("import spear_envs", "s CPU", at_most=0.5),
    Bar("heavy packages that this imports", at_most=0.0),
    Bar("make test", "min CPU", at_most=15.0, size="full"),
    Bar("fast tests that failed", at_most=0.0, size="full"),
)
ROOT = Path(__file__).resolve().parents[1]
HEAVY = "torch transformers verl ray vllm matplotlib faiss sentence_transformers onnxruntime fastapi httpx"
IMPORT = f"import spear_envs, sys; print(sorted(set({HEAVY.split()!r}) & set(sys.modules)))"


def measure_command(*command: str) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Seconds of CPU and by the clock of a process and those below it, and what came of it."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done


def measure_starts() -> Iterator[Figure]:
    """Imports and the command, over a bare interpreter's start."""
    bare = median(measure_command(sys.executable, "-c", "pass")[0] for _ in range(5))
    imports = [measure_command(sys.executable, "-c", IMPORT) for _ in range(7)]
    heavy = imports[0][2].stdout.strip()
    yield Figure("import spear_envs", median(cpu for cpu, _, _ in imports) - bare, "s CPU")
    yield Figure("heavy packages that this imports", len(re.findall(r"'\w+'", heavy)), note=heavy.strip("[]"))
    helps = [measure_command(sys.executable, "-m", "spear_envs.cli", "--help")[0] for _ in range(5)]
    yield Figure("spear --help", median(helps), "s CPU")


def measure_tests() -> Iterator[Figure]:
    """``make test`` without its set-up."""
    environment = [f"PYTHONPATH={ROOT}", f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}"]
    cpu, wall, done = measure_command("env", *environment, sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=20")
    last = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    failed = re.search(r"(\d+) (?:failed|error)", last)
    yield Figure("make test", cpu / 60, "min CPU", note=f"{wall / 60:.1f} minutes by the clock; {last.strip('= ')}")
    yield Figure("fast tests that failed", int(failed[1]) if failed else 0 if done.returncode == 0 else 1)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures; the tests with ``--full``."""
    yield from measure_starts()
    if options.size is Size.FULL:
        yield from measure_tests()


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("spear-envs", "gymnasium", "numpy"))


if __name__ == "__main__":
    sys.exit(main())
