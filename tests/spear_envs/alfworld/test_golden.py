"""Recorded games of TextWorld, replayed through the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_all_recorded_games_hold(shared: Path, root: Path, official_games: Path) -> None:
    check = shared / "golden" / "alfworld" / "check.py"
    if not check.exists():
        pytest.skip(f"{check.name} of the recorded ALFWorld games is not there")
    run = subprocess.run(
        [sys.executable, str(check), str(official_games)], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "90 of 90 hold", run.stderr
