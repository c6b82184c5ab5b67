"""Servers of other projects, which benchmarks start beside ours in the same run.

They are on no package index, or their pins exclude ours: each gets its repository and an environment of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from spear_envs.core import SpearError

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "bench" / "peers"
START_S = 180.0
"""Seconds that a server may take until it answers; Search-R1's imports torch and loads its corpus first."""


@dataclass(frozen=True)
class Peer:
    """Another project's server, and how its environment is made."""

    name: str
    repository: str
    commit: str
    """The commit that was measured; another one may need other packages."""
    packages: tuple[str, ...]
    """Requirements for pip."""
    alone: tuple[str, ...] = ()
    """Requirements that are installed without theirs, of which the server needs few."""
    folders: tuple[str, ...] = ()
    """Empty folders that it expects, relative to its own."""
    needs: tuple[str, ...] = ()
    """Programs that must be on the path."""

    @property
    def folder(self) -> Path:
        """Where it lies, if it was fetched."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def sources(self) -> Path:
        """Its repository."""
        return self.folder / "sources"

    @property
    def is_here(self) -> bool:
        """Whether it was set up to the end."""
        return (self.folder / "ready").is_file()


SANDBOX_FUSION = Peer(
    "sandbox-fusion",
    "https://github.com/bytedance/SandboxFusion",
    "469de0845cb7d665bc68044d541aa3aa28c5b30a",
    (
        *("pydantic>=2.4,<2.7", "fastapi>=0.103.1,<0.104", "uvicorn[standard]==0.25.0", "structlog>=23.1,<24"),
        *("psutil>=5.9.8,<6", "aiofiles>=23.2.1,<24", "aiohttp>=3.9.5,<4", "tenacity>=8.4.2,<9"),
        *(
            "databases[aiomysql,aiosqlite]>=0.9,<0.10",
            "pyyaml",
            "omegaconf",
            "datasets",
            "transformers>=4.44,<5",
            "sympy",
        ),
    ),
    # It looks for a folder of conda's beside its interpreter, and serves its documentation.
    folders=("venv/condabin", "sources/docs/build"),
)
SEARCH_R1 = Peer(
    "search-r1",
    "https://github.com/PeterGriffinJin/Search-R1",
    "a14dc3a4ffc6fe88c1e95038d9738e21ba3f7a06",
    (
        *("torch==2.13.0", "transformers>=4.44,<5", "faiss-cpu", "datasets", "fastapi", "uvicorn", "tqdm", "requests"),
        # Imported by pyserini.
        *("pyjnius", "onnxruntime", "pandas", "pyyaml", "scikit-learn", "scipy"),
    ),
    # The last version for Java 11 to 17.
    alone=("pyserini==0.22.1",),
    needs=("java",),
)
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (SANDBOX_FUSION, SEARCH_R1)}


@contextmanager
def start_fusion(port: int, enter: Callable[[], None]) -> Iterator[int]:
    """SandboxFusion's server on a port, without isolation (its configuration ``local``); yields its process id.

    ``enter`` is called in the new process before it starts. Its programs start a shell that reads the user's start-up
    files, so the home folder is an empty one.
    """
    peer = SANDBOX_FUSION
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": f"{peer.python.parent}:/usr/bin:/bin", "SANDBOX_CONFIG": "local"}
        command = [str(peer.python), "-m", "uvicorn", "sandbox.server.server:app", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--log-level", "warning"]
        with _run_server(command, f"http://127.0.0.1:{port}/v1/ping", peer, environment, enter) as pid:
            yield pid


@contextmanager
def start_search_r1(port: int, arguments: Sequence[str]) -> Iterator[int]:
    """Search-R1's retrieval server on a port; yields its process id.

    It is started by ``search_r1.py``, since it listens on all addresses and computes on a GPU by itself.
    """
    peer = SEARCH_R1
    command = [str(peer.python), str(Path(__file__).with_name("search_r1.py")), str(peer.sources), str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with _run_server([*command, *arguments], f"http://127.0.0.1:{port}/docs", peer, environment, None) as pid:
        yield pid


@contextmanager
def _run_server(
    command: Sequence[str], address: str, peer: Peer, environment: Mapping[str, str], enter: Callable[[], None] | None
) -> Iterator[int]:
    """Run a server until it answers at an address, and end it. Raises SpearError with its log if it does not start."""
    log = peer.folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=peer.sources, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, preexec_fn=enter
        )
    try:
        end = time.monotonic() + START_S
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > end:
                raise SpearError(f"{peer.name} does not start: see {log}.")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def find_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
