"""``spear serve`` where a package of its extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_it_is_not_ready_without_its_packages() -> None:
    pytest.importorskip("uvicorn", reason="uvicorn comes with the extras 'train' and 'env-server'")
    code = "import sys; sys.modules['websockets'] = None; from spear_envs.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "spear/Sokoban-v1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'spear-envs[env-server]' brings it" in done.stderr and "Traceback" not in done.stderr
