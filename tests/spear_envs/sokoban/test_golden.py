"""Recorded games of gym-sokoban, replayed through the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.spear_envs.sokoban.peer import find_peer

# The games are played on levels of their own, under the id of their time.
AS_RECORDED = """
import runpy, sys
from spear_envs import register_env
register_env("spear/Sokoban-v0", "spear_envs.sokoban.env:SokobanEnv")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_all_recorded_games_hold(shared: Path) -> None:
    check = shared / "golden" / "sokoban" / "check.py"
    if not check.exists():
        pytest.skip(f"{check.name} of the recorded Sokoban games is not there")
    options = [] if find_peer() else ["--no-pixels"]
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, "-c", AS_RECORDED, str(check), *options], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "60 of 60 hold", run.stderr
