"""GEM beside ours, in the environment of its own that its pins ask for (``scripts/setup_peers.sh``).

Not named gem: the script that the other environment runs lies beside it, and imports GEM.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

__all__ = ["GEM", "MEND", "PythonTool", "find_python", "play_sokoban", "start_tool"]

GEM = "GEM"
MEND = "GEM is left out: scripts/setup_peers.sh makes .venv-peers (or name another one with PEERS)"
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("gem_peer.py")


def find_python() -> Path | None:
    """The interpreter that has GEM."""
    python = ROOT / os.environ.get("PEERS", ".venv-peers") / "bin" / "python"
    return python if python.exists() else None


def _make_environment(python: Path) -> dict[str, str]:
    # Its tool calls plain `python`, which is to have the same packages.
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment.pop("PYTHONPATH", None)
    return environment


def play_sokoban(python: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Its Sokoban under random play: ``steps_per_second`` and ``reset_ms`` in CPU time, ``episodes``."""
    command = [str(python), str(SCRIPT), "sokoban", str(steps)]
    done = subprocess.run(
        command, cwd=folder, env=_make_environment(python), capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


class PythonTool:
    """Its Python tool in a process, for one program at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_free = asyncio.Lock()

    async def run(self, code: str) -> str:
        """Return what the tool shows of a program's output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        async with self._is_free:
            self._process.stdin.write(json.dumps(code).encode() + b"\n")
            await self._process.stdin.drain()
            shown: str = json.loads(await self._process.stdout.readline())
        return shown.removeprefix("Code execution result: ").rstrip("\n") + "\n"


@asynccontextmanager
async def start_tool(python: Path, folder: Path) -> AsyncIterator[PythonTool]:
    """The tool's process, in a folder for its files."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(python), str(SCRIPT), "python", cwd=folder, env=_make_environment(python), stdin=pipe, stdout=pipe
    )
    try:
        yield PythonTool(process)
    finally:
        process.terminate()
        await process.wait()
