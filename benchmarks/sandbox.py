"""The sandbox over HTTP and as a pool: CPU time, waits, rate.

The service comes first: CPU time of a ``print`` and of a cubic solved by SymPy at 1, 16 and 64 clients, in turn with a
clean interpreter that is started for the same program; waits in an open loop; memory. Then the pool without HTTP,
beside bubblewrap and GEM's tool. CPU time is that of control groups, so it needs root. SandboxFusion is measured in the
same rounds if `python -m benchmarks.peers get sandbox-fusion` has set it up. Last comes a mixed load, and what is left
of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.parts import gem_process
from benchmarks.parts.sandbox_http import CpuGroup, measure_http
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_sandbox.installation import Installation, find_installation
from spear_sandbox.pool.backends import BwrapBackend
from spear_sandbox.pool.local import GUEST_UID, LocalExecutor
from spear_sandbox.pool.runs import carry_out, make_job
from spear_sandbox.pool.zygotes import start_zygote
from spear_sandbox.protocol import Isolation, Limits, RunStatus

PRINT = "print(1 + 1)"
SOLVE = """
import numpy as np
import sympy as sp
x = sp.symbols("x")
roots = sp.solve(x**3 - 6 * x**2 + 11 * x - 6, x)
print(roots, round(np.linalg.det(np.array([[2.0, 1.0], [1.0, 3.0]])), 6))
"""
PROGRAMS = {"print": PRINT, "numpy+sympy": SOLVE}
ANSWERS = {"print": "2\n", "numpy+sympy": "[1, 2, 3] 5.0\n"}
BARS = (
    Bar("print, 64 at a time", "ms CPU", at_most=12.0),
    Bar("numpy+sympy, 64 at a time", "ms CPU", at_most=45.0),
    Bar("print over HTTP, 1 at a time", "ms CPU", at_most=7.0),
    Bar("print over HTTP, 16 at a time", "ms CPU", at_most=7.0),
    Bar("print over HTTP, 64 at a time", "ms CPU", at_most=7.0),
    Bar("print over HTTP, 1 at a time: SandboxFusion's over ours", "times", at_least=4.0),
    Bar("print over HTTP, 16 at a time: SandboxFusion's over ours", "times", at_least=4.0),
    Bar("print over HTTP, 64 at a time: SandboxFusion's over ours", "times", at_least=4.0),
    Bar("print over HTTP at half load: refused", at_most=0.0),
    Bar("start of an interpreter, standard library", "s CPU", at_most=3.0),
    Bar("start of an interpreter, all packages", "s CPU", at_most=3.0),
    Bar("mixed runs", at_least=10_000.0, size="standard"),
    Bar("mixed runs: processes left", at_most=0.0, size="standard"),
    Bar("mixed runs: descriptors left", at_most=0.0, size="standard"),
    Bar("mixed runs: mounts left", at_most=0.0, size="standard"),
    Bar("mixed runs: temporary files left", at_most=0.0, size="standard"),
    Bar("mixed runs: resident memory of this process grown by", "MB", at_most=20.0, size="standard"),
    Bar("mixed runs: resident memory of the interpreters grown by", "MB", at_most=20.0, size="standard"),
)
MIXED_RUNS = {Size.QUICK: 400, Size.STANDARD: 10_000, Size.FULL: 10_000}
CONCURRENCY = (1, 8, 64)
IN_FLIGHT = 64
ROUNDS = 5
SYSTEM_PYTHON = Path("/usr/bin/python3")

Run = Callable[[str], Awaitable[str]]
"""Runs a program and gives what it printed."""


async def run_many(run: Run, code: str, expected: str, count: int, at_a_time: int) -> None:
    """Run a program so often, so many at a time, and see that each answer is right."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            printed = await run(code)
            assert printed == expected, printed

    await asyncio.gather(*(work() for _ in range(at_a_time)))


def make_pool_runner(executor: LocalExecutor) -> Run:
    async def run(code: str) -> str:
        return (await executor.run(code)).stdout

    return run


async def make_bwrap_runner(installation: Installation) -> Run:
    """Our level ``bwrap``: an interpreter for each run."""
    limits = Limits()
    backend = BwrapBackend(Isolation.BWRAP, installation, uid=GUEST_UID, limits=limits)
    await backend.start()
    slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))

    async def run(code: str) -> str:
        async with slots, backend.borrow(code) as fork:
            job = make_job(code, None, (), limits)
            return (await carry_out(job, None, limits, backend.level, fork)).stdout

    return run


async def measure_cpu(group: CpuGroup, executor: LocalExecutor, quick: bool) -> AsyncIterator[Figure]:
    """CPU milliseconds of a run, by program, runner and concurrency."""
    installation = find_installation()
    runners: dict[str, Run] = {"sandbox": make_pool_runner(executor)}
    if shutil.which("bwrap"):
        reachable = installation
        if os.getuid() == 0 and not _is_open(installation.interpreter):
            # A home folder of root: bubblewrap runs as another user.
            reachable = replace(installation, interpreter=os.path.realpath(SYSTEM_PYTHON), prefix="/usr")
        runners["bwrap"] = await make_bwrap_runner(reachable)
    async with AsyncExitStack() as stack:
        python = gem_process.find_python()
        if python is None:
            print(gem_process.MEND)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            tool = await stack.enter_async_context(gem_process.start_tool(python, Path(folder)))
            runners[f"{gem_process.GEM}, not isolated"] = tool.run
        async for figure in _compare_runners(group, runners, quick):
            yield figure


async def _compare_runners(group: CpuGroup, runners: Mapping[str, Run], quick: bool) -> AsyncIterator[Figure]:
    """Each program, at each concurrency, by each runner in turn."""
    for name, code in PROGRAMS.items():
        for at_a_time in CONCURRENCY:
            spent: dict[str, list[float]] = {runner: [] for runner in runners}
            for turn in range(2 if quick else ROUNDS):
                for runner, run in runners.items():
                    if runner != "sandbox" and turn > 0 and (quick or turn > 2):
                        continue  # half a second of CPU for each run
                    count = max(at_a_time, 32 if runner == "sandbox" else 8)
                    start = group.read()
                    await run_many(run, code, ANSWERS[name], count, at_a_time)
                    spent[runner].append((group.read() - start) / count * 1e3)
            about = f"{name}, {at_a_time} at a time"
            for runner, values in spent.items():
                yield Figure(about, median(values), "ms CPU", of="" if runner == "sandbox" else runner)


def _is_open(path: str) -> bool:
    return all(os.stat(parent).st_mode & 0o001 for parent in Path(path).parents)


async def measure_start(group: CpuGroup, quick: bool) -> AsyncIterator[Figure]:
    """CPU seconds until a warm interpreter can fork: what it takes where nothing else runs."""
    installation = find_installation()
    last = len(installation.kinds) - 1
    for place, kind in enumerate(installation.kinds):
        seconds = []
        for _ in range(2 if quick else ROUNDS):
            start = group.read()
            zygote = await start_zygote(installation, kind.modules, uid=GUEST_UID)
            seconds.append(group.read() - start)
            await zygote.close()
        modules = ", ".join(name for name in kind.modules if "." not in name)
        which = {0: "standard library", last: "all packages"}.get(place, "some packages")
        yield Figure(f"start of an interpreter, {which}", min(seconds), "s CPU", note=modules)


MIXED: tuple[tuple[str, int], ...] = (
    (PRINT, 12),
    (SOLVE, 2),
    ("1 / 0", 2),
    ("import os; os.fork(); print('two')", 1),
    ("import subprocess; subprocess.Popen(['/bin/sleep', '60'])", 1),
    ("open('left', 'wb').write(bytes(1 << 20))", 1),
    ("while True: pass", 1),
)
"""Programs of the mixed load and how often each comes in a round."""


async def measure_leaks(executor: LocalExecutor, runs: int) -> list[Figure]:
    """Measure what a mixed load leaves behind; the figures have bars."""
    with tempfile.TemporaryDirectory() as folder:
        # A folder of its own, as other programs of this machine have temporary files, too.
        former, tempfile.tempdir = tempfile.tempdir, folder
        try:
            return await _play_and_count(executor, runs)
        finally:
            tempfile.tempdir = former


async def _play_and_count(executor: LocalExecutor, runs: int) -> list[Figure]:
    chance = random.Random(7)
    programs = [code for code, times in MIXED for _ in range(times)]
    in_flight = asyncio.Semaphore(2 * executor.max_running)
    short = replace(executor.limits, wall_s=0.2)
    ended = {status: 0 for status in RunStatus}

    async def call(code: str) -> None:
        async with in_flight:
            outcome = await executor.run(code, limits=short if code.startswith("while") else None)
            ended[outcome.status] += 1

    async def play(count: int) -> None:
        await asyncio.gather(*(call(chance.choice(programs)) for _ in range(count)))

    # Until every interpreter has met every program: what they touch first is not a leak.
    await play(min(500, runs))
    before = count_resources()
    start = time.perf_counter()
    for done in range(0, runs, 1000):
        await play(min(1000, runs - done))
    seconds = time.perf_counter() - start
    for _ in range(100):  # worn-out interpreters end after their last run
        after = count_resources()
        if after["processes"] <= before["processes"]:
            break
        await asyncio.sleep(0.1)
    figures = [Figure("mixed runs", runs), Figure("mixed runs, rate", runs / seconds, "runs/s")]
    for name in ("processes", "descriptors", "mounts", "temporary files"):
        figures.append(Figure(f"mixed runs: {name} left", max(0, after[name] - before[name])))
    for name, whose in (("own_kb", "this process"), ("below_kb", "the interpreters")):
        grown = (after[name] - before[name]) / 1024
        figures.append(Figure(f"mixed runs: resident memory of {whose} grown by", grown, "MB"))
    return figures


def count_resources() -> dict[str, int]:
    """Count the resources of this process and those below it."""
    below = list(_list_below(os.getpid()))
    return {
        "processes": len(below),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
        "own_kb": _read_rss(os.getpid()),
        "below_kb": sum(map(_read_rss, below)),
    }


def _read_rss(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return 0


def _list_below(ancestor: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == ancestor:
                yield int(folder.name)
                yield from _list_below(int(folder.name))


async def measure_all(options: argparse.Namespace, group: CpuGroup) -> AsyncIterator[Figure]:
    """All parts."""
    quick = options.size is Size.QUICK
    async for figure in measure_http(options):
        yield figure
    group.enter()
    async for figure in measure_start(group, quick):
        yield figure
    # Admission as wide as the widest concurrency would only make runs wait for a core inside instead of outside.
    executor = LocalExecutor()
    await executor.start()
    try:
        async for figure in measure_cpu(group, executor, quick):
            yield figure
        for figure in await measure_leaks(executor, MIXED_RUNS[options.size]):
            yield figure
    finally:
        await executor.close()


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures, in this process's control group."""
    loop = asyncio.new_event_loop()
    with CpuGroup("pool") as group, contextlib.closing(loop):
        figures = measure_all(options, group)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield loop.run_until_complete(anext(figures))
        group.leave()


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("numpy", "scipy", "sympy"))


if __name__ == "__main__":
    sys.exit(main())
