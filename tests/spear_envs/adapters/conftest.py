"""The environment with libraries whose pins exclude ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPeer = Callable[..., str]


@pytest.fixture(scope="session")
def run_peer(root: Path) -> RunPeer:
    """Runs a script of ``scripts`` beside this file with the Python of ``.venv-peers``; returns what it prints."""
    python = root / os.environ.get("PEERS", ".venv-peers") / "bin" / "python"
    if not python.exists():
        if os.environ.get("CI"):
            pytest.fail("scripts/setup_peers.sh has not been run")
        pytest.skip("no .venv-peers: scripts/setup_peers.sh makes it (openenv and gem-llm, whose pins exclude ours)")

    def run(script: str, *args: str) -> str:
        path = Path(__file__).parent / "scripts" / script
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [str(python), str(path), *args], cwd=root, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run
