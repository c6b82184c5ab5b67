"""The sandbox over HTTP, as its users have it: CPU time, waits in an open loop, the rate that it keeps up, memory."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.peers import SANDBOX_FUSION, find_port, start_fusion
from benchmarks.runner.figures import Figure, LeftOut, Size
from spear_sandbox.installation import Installation, find_installation

__all__ = ["CpuGroup", "measure_http"]

PRINT = "print(1 + 1)"
SOLVE = """
import sympy as sp
x = sp.symbols("x")
print(sp.solve(x**3 - 6 * x**2 + 11 * x - 6, x))
"""
PROGRAMS = {"print": (PRINT, "2\n"), "sympy": (SOLVE, "[1, 2, 3]\n")}
CLIENTS = (1, 16, 64)
ROUNDS = {Size.QUICK: 2, Size.STANDARD: 5, Size.FULL: 5}
SECONDS = {Size.QUICK: 4.0, Size.STANDARD: 20.0, Size.FULL: 60.0}
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of the rate of 64 clients who ask as soon as they are answered, tried as rates to keep up."""
KEPT_UP_S = 1.0
"""A rate is kept up if the 99th percentile of waits stays below."""


class CpuGroup:
    """A control group: CPU time of the processes that enter it and of all that they start, gone or not."""

    def __init__(self, name: str) -> None:
        self._name = f"benchmark-{name}-{os.getpid()}"
        self._folder = Path()
        self._usage = Path()

    def __enter__(self) -> CpuGroup:
        for base, usage in (("cpuacct", "cpuacct.usage"), ("cpu,cpuacct", "cpuacct.usage"), ("", "cpu.stat")):
            self._folder = Path("/sys/fs/cgroup", base, self._name)
            with contextlib.suppress(OSError):
                self._folder.mkdir()
                self._usage = self._folder / usage
                self.read()
                return self
        raise LeftOut("no control group for CPU time can be made here: run it as root")

    def __exit__(self, *_: object) -> None:
        for _try in range(50):
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.1)

    def enter(self) -> None:
        """Move this process into it."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        """Move this process to where the group lies."""
        (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))

    def read(self) -> float:
        """Seconds."""
        text = self._usage.read_text()
        if self._usage.name == "cpu.stat":
            return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
        return int(text) / 1e9


class Connection:
    """Asks on one connection, with little work of its own, which would count as waits of the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """To the service on this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, body: bytes) -> tuple[int, Any]:
        """Status and content of the answer."""
        head = b"POST /run_code HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._writer.write(head + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer)
        assert length is not None, answer
        return int(answer.split(b" ", 2)[1]), json.loads(await self._reader.readexactly(int(length[1])))

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


@dataclass
class Service:
    """A server of ``/run_code`` in a control group of its own: ``spear-sandbox serve``, or SandboxFusion's."""

    port: int
    group: CpuGroup
    pid: int

    async def run_many(self, code: str, expected: str, count: int, clients: int) -> float:
        """Have so many clients ask as soon as they are answered, ``count`` times in all; seconds."""
        body, left = write_body(code), iter(range(count))
        connections = [await Connection.open(self.port) for _ in range(clients)]

        async def work(connection: Connection) -> None:
            for _ in left:
                status, said = await connection.ask(body)
                assert status == 200 and said["run_result"]["stdout"] == expected, said

        start = time.perf_counter()
        await asyncio.gather(*map(work, connections))
        seconds = time.perf_counter() - start
        for connection in connections:
            connection.close()
        return seconds

    async def measure_waits(self, code: str, rate: float, seconds: float) -> tuple[list[float], int]:
        """Ask at the times of a Poisson process, whether it answers or not.

        Returns:
            Seconds from the time that a request was due to its answer, and how many were refused.
        """
        chance, body = random.Random(5), write_body(code)
        idle: list[Connection] = []
        waits, refused = [], 0

        async def call(due: float) -> None:
            nonlocal refused
            connection = idle.pop() if idle else await Connection.open(self.port)
            status, _ = await connection.ask(body)
            idle.append(connection)
            waits.append(time.perf_counter() - due)
            refused += status != 200

        calls, due = [], time.perf_counter()
        end = due + seconds
        while (due := due + chance.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            calls.append(asyncio.ensure_future(call(due)))
        await asyncio.gather(*calls)
        for connection in idle:
            connection.close()
        return waits, refused

    def read_memory(self) -> float:
        """MiB of the service and all processes below it, shared pages counted once."""
        found, todo = 0, [self.pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    todo += map(int, (thread / "children").read_text().split())
        return found / 1024


def write_body(code: str) -> bytes:
    return json.dumps({"code": code, "language": "python", "run_timeout": 30, "compile_timeout": 60}).encode()


@contextlib.contextmanager
def start_service() -> Iterator[Service]:
    with CpuGroup("service") as group:
        process = subprocess.Popen(
            [sys.executable, "-m", "spear_sandbox", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=group.enter,
        )
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)/run_code", process.stdout.readline())
            if found is None:
                raise LeftOut("the service does not start here: see `spear sandbox doctor`")
            yield Service(int(found[1]), group, process.pid)
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def find_clean_interpreter(installation: Installation) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command and environment of an interpreter that loads nothing but what a program asks for.

    Its own site-packages may hold files that run at every start, so it is started without :mod:`site`.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, path in installation.packages.items():
            os.symlink(path, f"{folder}/{name}")
        environment = {"PYTHONPATH": folder, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}
        yield [installation.interpreter, "-s", "-S", "-c"], environment


async def measure_subprocess(code: str, expected: str, count: int, clients: int) -> float:
    """CPU milliseconds of a run in a clean interpreter, started for it and not isolated."""
    with CpuGroup("subprocess") as group, find_clean_interpreter(find_installation()) as (command, environment):
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                process = await asyncio.create_subprocess_exec(
                    *command, code, env=environment, stdout=asyncio.subprocess.PIPE, preexec_fn=group.enter
                )
                assert (await process.communicate())[0].decode() == expected

        await asyncio.gather(*(work() for _ in range(clients)))
        return group.read() / count * 1e3


@contextlib.contextmanager
def start_peer() -> Iterator[Service | None]:
    """SandboxFusion's server, or None where it was not set up."""
    if not SANDBOX_FUSION.is_here:
        print(f"SandboxFusion is left out: python -m benchmarks.peers get {SANDBOX_FUSION.name}", flush=True)
        yield None
        return
    port = find_port()
    with CpuGroup("fusion") as group, start_fusion(port, group.enter) as pid:
        yield Service(port, group, pid)


async def measure_run(service: Service, code: str, expected: str, clients: int) -> float:
    """Milliseconds of CPU of a run."""
    start, count = service.group.read(), max(64, 2 * clients)
    await service.run_many(code, expected, count, clients)
    return (service.group.read() - start) / count * 1e3


async def measure_cpu(service: Service, peer: Service | None, size: Size) -> AsyncIterator[Figure]:
    """CPU of a run by program and clients; ours, SandboxFusion's and a subprocess in turn."""
    for name, (code, expected) in PROGRAMS.items():
        for each in (service, peer):
            if each is not None:
                await each.run_many(code, expected, 64, 8)
        for clients in CLIENTS:
            ours, fusions, bare = [], [], []
            for _ in range(ROUNDS[size]):
                ours.append(await measure_run(service, code, expected, clients))
                if peer is not None:
                    fusions.append(await measure_run(peer, code, expected, clients))
                bare.append(await measure_subprocess(code, expected, 8, min(clients, 2 * (os.cpu_count() or 1))))
            about = f"{name} over HTTP, {clients} at a time"
            yield Figure(about, median(ours), "ms CPU", note=f"load {os.getloadavg()[0]:.1f}")
            yield Figure(about, median(bare), "ms CPU", of="subprocess, clean, no HTTP, not isolated")
            if fusions:
                ratios = [theirs / own for theirs, own in zip(fusions, ours, strict=True)]
                yield Figure(about, median(fusions), "ms CPU", of="SandboxFusion", note="it isolates nothing")
                spread = f"rounds from {min(ratios):.2f} to {max(ratios):.2f}"
                yield Figure(f"{about}: SandboxFusion's over ours", median(ratios), "times", note=spread)


async def measure_load(service: Service, size: Size) -> AsyncIterator[Figure]:
    """Waits in an open loop, and the largest share of the closed loop's rate that it keeps up."""
    code, expected = PROGRAMS["print"]
    count = 64 * ROUNDS[size] * 4
    most = count / await service.run_many(code, expected, count, 64)
    for share in SHARES:
        waits, refused = await service.measure_waits(code, share * most, SECONDS[size])
        p99 = quantiles(waits, n=100)[98]
        if not refused and p99 < KEPT_UP_S:
            yield Figure("print over HTTP: rate kept up", share * most, "runs/s", note=f"p99 {p99 * 1e3:.0f} ms")
            break
    waits, refused = await service.measure_waits(code, most / 2, SECONDS[size])
    p50, p99 = median(waits) * 1e3, quantiles(waits, n=100)[98] * 1e3
    yield Figure("print over HTTP at half load: refused", refused, note=f"{len(waits)} asked for")
    yield Figure("print over HTTP at half load: p50", p50, "ms", note=f"{most / 2:.0f} runs/s, open loop")
    yield Figure("print over HTTP at half load: p99", p99, "ms")


async def measure_http(options: argparse.Namespace) -> AsyncIterator[Figure]:
    """All figures over HTTP."""
    with start_service() as service:
        await asyncio.sleep(5)  # until the interpreters of all kinds are warm
        yield Figure("memory of the service at rest", service.read_memory(), "MiB", note="three warm interpreters")
        with start_peer() as peer:
            async for figure in measure_cpu(service, peer, options.size):
                yield figure
        async for figure in measure_load(service, options.size):
            yield figure
        yield Figure("memory of the service after that", service.read_memory(), "MiB")
