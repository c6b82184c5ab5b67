"""A disk that is full: one clear error, nothing half written instead of something whole, and on with it later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.resilience.full_disk import ROOM

MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
INSIDE = 'mount -t tmpfs -o size=1m,nr_inodes=2k tmpfs "$1" && shift && exec "$@"'


def run_on_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command with a file system of 1 MiB on ``folder``, which nobody else sees."""
    full = [*MOUNT, INSIDE, "sh", str(folder), *command]
    return subprocess.run(full, capture_output=True, text=True, timeout=240, check=False)


EXPECTED: dict[str, Any] = {
    "eval": 1.0,
    "collect": True,
    "export": True,
    "index": True,
    "download": True,
    "samples": True,
    "checkpoint": [1, 2],
}


HEAVY = ("samples", "checkpoint")
"""They import torch and verl in the process of the scenario."""


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in ROOM]
)
def test_a_full_disk_is_told_and_costs_nothing_that_was_there(tmp_path: Path, scenario: str) -> None:
    try:
        probe = run_on_small_disk(tmp_path, "true")
    except FileNotFoundError:
        pytest.skip("no program unshare on this machine")
    if probe.returncode:
        pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
    if scenario in HEAVY:
        pytest.importorskip("verl", reason="needs the extra 'train'")
    done = run_on_small_disk(tmp_path, sys.executable, "-m", "tests.resilience.full_disk", str(tmp_path), scenario)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    full = seen["full"]
    assert full["code"] == 1, f"it was to fail: {full}"
    said = full["said"].splitlines()[-1]
    assert said.startswith("Error: ") and "Traceback" not in full["said"], full
    assert any(word in said for word in ("space", "disk", "free", "cannot be written")), said
    assert seen["left"] == [], "nothing temporary stays"
    assert seen["again"]["code"] == 0, seen["again"]
    assert seen["found"] == EXPECTED[scenario]
