"""A disk that is full, power that fails, and builds that are killed: nothing half written counts."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spear_agents.evaluation.records import EPISODES, read_last
from spear_envs.bm25.index import SearchIndex
from spear_envs.webshop.build import AttributeTable
from spear_envs.webshop.store import check_store
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
SLOW = (*HEAVY, "collect", "export")


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ROOM]
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


def check_checkpoint(folder: Path) -> None:
    from spear_training.run.checkpoints import check_files

    check_files(folder / "checkpoints" / "global_step_1")
    assert (folder / "checkpoints" / "global_step_1" / "actor" / "weights.bin").read_bytes() == b"w" * 100_000


def check_download(folder: Path) -> None:
    assert (folder / "data").read_text() == "hello"


class Case(NamedTuple):
    program: str
    mark: str
    check: Callable[[Path], object]


EVALUATE = """
from spear_agents import evaluate
evaluate("spear/Sokoban-v1", engine="expert", tasks=3, env_kwargs={"modality": "text"}, out=folder / "run")
"""
CHECKPOINT = """
from spear_training.run.checkpoints import finish_checkpoint, write_state
step = folder / "checkpoints" / "global_step_1"
(step / "actor").mkdir(parents=True)
(step / "actor" / "weights.bin").write_bytes(b"w" * 100_000)
write_state(step, {"format": 1})
finish_checkpoint(step)
"""
DOWNLOAD = """
from spear_envs.data import RemoteFile, fetch
(folder / "source").write_text("hello")
fetch(RemoteFile("data", size=5), folder, source=folder / "source")
"""
WORDS = """
from spear_envs.bm25.build import build_index
build_index([f"word{i} other" for i in range(100)], folder / "index", processes=1)
"""
STORE = """
from spear_envs.webshop.build import build_store
from tests.spear_envs.webshop import catalogues
records = [catalogues.make_record(f"B{i:03d}") for i in range(8)]
entries = {record["asin"]: catalogues.make_entry("soft") for record in records}
build_store(catalogues.write(folder / "raw", records, entries), folder / "store", processes=1)
"""
CASES = {
    "checkpoint": Case(CHECKPOINT, "manifest.json", check_checkpoint),
    "evaluation": Case(EVALUATE, "summary.json", lambda folder: read_last(folder / "run" / EPISODES)[2]),
    "download": Case(DOWNLOAD, "data", check_download),
    "index of words": Case(WORDS, "index", lambda folder: SearchIndex.open(folder / "index").search("word7", 1)[0]),
    "store": Case(STORE, "store", lambda folder: check_store(folder / "store")),
    "table of a store": Case(
        STORE, "attributes.npz", lambda folder: AttributeTable(folder / "store.partial").get("B001")["attributes"]
    ),
    "small file": Case(
        "from spear_envs.data.files import write_json; write_json(folder / 'a.json', {})",
        "a.json",
        lambda folder: (folder / "a.json").read_text()[0],
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    made = tmp_path_factory.mktemp("library") / "power_loss.so"
    source = Path(__file__).with_name("power_loss.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


def leave_synced(kept: Path, folder: Path, mark: Path) -> None:
    """Leave of a folder what was synced, and the name of the mark."""
    entries = (kept / str(folder.stat().st_ino)).read_text() if (kept / str(folder.stat().st_ino)).exists() else ""
    left = {name: int(number) for number, name in (entry.split(" ", 1) for entry in entries.splitlines())}
    for path in list(folder.iterdir()):
        inode = path.stat().st_ino
        if left.get(path.name) != inode and path not in (mark, *mark.parents):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.is_dir():
            leave_synced(kept, path, mark)
        else:
            path.write_bytes((kept / str(inode)).read_bytes() if (kept / str(inode)).exists() else b"")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "checkpoint" else []) for name in CASES]
)
def test_a_mark_does_not_outlive_what_it_marks(name: str, library: Path, tmp_path: Path, root: Path) -> None:
    case = CASES[name]
    if name == "checkpoint":
        pytest.importorskip("verl", reason="needs the extra 'train'")
    folder, kept = tmp_path / "disk", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    program = f"import os\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\n{case.program}"
    lost = {"LD_PRELOAD": str(library), "POWER_LOSS_KEPT": str(kept), "POWER_LOSS_AT": case.mark}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, **lost}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (mark,) = folder.rglob(case.mark)
    leave_synced(kept, folder, mark)
    assert case.check(folder) is not False


KILLS = 12
KILLED_BUILDS_WORDS = """
from spear_envs.bm25 import build
build.CHUNK_DOCUMENTS = 300
build.build_index((f"word{i} number{i % 97} text" for i in range(9_000)), folder / "made", processes=1)
"""
KILLED_BUILDS_STORE = """
from spear_envs.webshop import build
from tests.resilience.test_damaged_files import write_catalogue
from spear_envs.webshop.products import find_files
build.CHUNK_RECORDS = 20
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
@pytest.mark.parametrize("program", [KILLED_BUILDS_WORDS, KILLED_BUILDS_STORE], ids=["words", "store"])
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
