"""Builds of indexes that are killed at random moments and begun again end as one that was never killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = 12
WORDS = """
from spear_envs.bm25 import build
build.CHUNK_DOCUMENTS = 300
build.build_index((f"word{i} number{i % 97} text" for i in range(9_000)), folder / "made", processes=1)
"""
STORE = """
from spear_envs.webshop import build, record_chunks
from tests.resilience.test_damaged_files import write_catalogue
from spear_envs.webshop.sources import find_files
record_chunks.CHUNK_RECORDS = 20
if not (folder / "raw" / "complete").exists():
    (folder / "raw").mkdir(exist_ok=True)
    write_catalogue(folder / "raw", products=400)
    (folder / "raw" / "complete").touch()
build.build_store(find_files(folder / "raw"), folder / "made", processes=1)
"""


def build(program: str, folder: Path, root: Path) -> subprocess.Popen[bytes]:
    begin = f"from pathlib import Path\nfolder = Path({str(folder)!r})\n"
    return subprocess.Popen([sys.executable, "-c", begin + program], cwd=root, stderr=subprocess.PIPE)


def read_all(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("program", [WORDS, STORE], ids=["words", "store"])
def test_killed_at_random_moments(program: str, root: Path, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    folder.mkdir()
    started = time.monotonic()
    process = build(program, whole, root)
    assert process.wait() == 0, process.communicate()[1].decode()
    seconds = time.monotonic() - started
    dice, killed = random.Random(0), 0
    while killed < KILLS:
        process = build(program, folder, root)
        try:
            process.wait(dice.uniform(0.1, 1) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        else:
            assert process.returncode == 0, process.communicate()[1].decode()
        process.communicate()
    process = build(program, folder, root)
    assert process.wait() == 0, process.communicate()[1].decode()
    assert read_all(folder / "made") == read_all(whole / "made")
    assert not list(folder.glob("*.partial"))
