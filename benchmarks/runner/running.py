"""Runs benchmarks and trainings, each in a process of its own whose end, however it comes, keeps what was done."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.runner.figures import Size, Status
from benchmarks.runner.registry import FOLDER, Benchmark
from benchmarks.runner.results import Result, read_result

__all__ = ["count_steps", "is_done", "run_one", "run_spear"]

ROOT = FOLDER.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
"""How a benchmark is ended, and the seconds that it has after each signal."""

POLL_S = 2.0
"""Seconds between two looks at a command that runs."""


def count_steps(folder: Path) -> int:
    """Training steps that a run has recorded."""
    from spear_agents.evaluation.records import TRAINED, read_history  # late: spear bench needs spear-envs alone

    return max((record["step"] for record in read_history(folder) if TRAINED[0] in record), default=0)


def run_spear(words: Sequence[str], log: Path, wait: Callable[[], object] = lambda: time.sleep(POLL_S)) -> int:
    """Run a command of ``spear`` and return its exit code; its output goes to the end of ``log``.

    ``wait`` is called again and again while it runs. Where it raises, the command is ended; the same one resumes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "spear_envs.cli", *words]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                wait()
        finally:
            process.terminate()  # a training shuts Ray down and can be resumed
            process.wait()
    return process.returncode


def is_done(result: Result | None, size: Size) -> bool:
    """Whether a benchmark needs not be run again for figures of this size."""
    return result is not None and result.size is size and result.status is Status.FINISHED


def run_one(
    benchmark: Benchmark, out: Path, size: Size, on_line: Callable[[str], None], limit_s: float | None = None
) -> Result | None:
    """Run one benchmark; its result, which says how it ended, or None if it ended before it had begun.

    What it builds stays in a folder beside the result until it has finished, so that the next run of this size
    continues there.

    Args:
        out: folder of the results; what it prints goes into ``NAME.log`` there.
        on_line: gets each line that it prints.
        limit_s: seconds after which it is ended.

    Raises:
        KeyboardInterrupt: Ctrl-C; the benchmark has ended then.
    """
    path, work = out / f"{benchmark.name}.json", out / "work" / f"{benchmark.name}-{size.value}"
    fresh = work.with_name(path.name)
    work.parent.mkdir(parents=True, exist_ok=True)
    fresh.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{FOLDER.name}.{benchmark.name}", "--json", str(fresh), "--work", str(work)]
    command += [] if size is Size.STANDARD else [f"--{size.value}"]
    environment = {**os.environ, **ONE_THREAD, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    with (out / f"{benchmark.name}.log").open("w", encoding="utf-8") as log:
        # A session of its own: Ctrl-C in the terminal reaches it through us, and what it started ends with it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with _replaced_at_last(path, fresh), _ended_at_last(process), _ended_after(process, limit_s) as is_late:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                on_line(line.rstrip("\n"))
            process.wait()
            result = read_result(fresh)
    if result is None or result.status is not Status.RUNNING:
        shutil.rmtree(work, ignore_errors=True)
        return result
    reason = "it took longer than it may" if is_late.is_set() else f"failed with exit code {process.returncode}"
    return replace(result, reason=f"{reason}: see {benchmark.name}.log")


@contextlib.contextmanager
def _replaced_at_last(path: Path, fresh: Path) -> Iterator[None]:
    """Put the new result in the old one's place, unless only the old one is finished."""
    try:
        yield
    finally:
        old, new = read_result(path), read_result(fresh)
        if new and (old is None or old.status is Status.RUNNING or new.status is not Status.RUNNING):
            os.replace(fresh, path)
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def _ended_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        _end(process)


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[str], limit_s: float | None) -> Iterator[threading.Event]:
    """End the process after so long; the event says whether that was done."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _end(process)

    timer = threading.Timer(limit_s or 0.0, end)
    timer.daemon = True
    if limit_s is not None:
        timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and all of its group, gently first."""
    for number, seconds in PATIENCE:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        until = time.monotonic() + seconds
        while _has_group(process) and time.monotonic() < until:
            time.sleep(0.05)
        if not _has_group(process):
            return


def _has_group(process: subprocess.Popen[str]) -> bool:
    process.poll()  # takes the exit code of one that has ended, which would else count as alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
