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
    """Runs a script of ``scripts`` beside this file with the Python of ``.venv-peers``, or of ``.venv-peers-GROUP``;
    returns what it prints."""

    def run(script: str, *args: str, group: str = "", seconds: int = 280) -> str:
        folder = os.environ.get("PEERS", ".venv-peers") + (f"-{group}" if group else "")
        python = root / folder / "bin" / "python"
        if not python.exists():
            if os.environ.get("CI") and not group:  # the others are large, and made for the night
                pytest.fail("scripts/setup_peers.sh has not been run")
            pytest.skip(f"no {folder}: scripts/setup_peers.sh all makes it, of libraries whose pins exclude ours")
        path = Path(__file__).parent / "scripts" / script
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [str(python), str(path), *args], cwd=root, env=environment, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run
