"""What marks something as complete never outlives it: file, then folder, then mark are synced.

A process is killed where its mark gets its name. Of everything else is left what was synced: contents of files and
entries of folders, as ``power_loss.c`` kept them. Readers must find that as if nothing had happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from spear_agents.records import EPISODES, read_last
from spear_envs.bm25.index import SearchIndex
from spear_envs.webshop.attribute_table import AttributeTable
from spear_envs.webshop.store import check_store


def check_checkpoint(folder: Path) -> None:
    from spear_training.checkpoints import check_files

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
from spear_training.checkpoints import finish_checkpoint, write_state
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
from tests.spear_envs.webshop import catalogs
records = [catalogs.make_record(f"B{i:03d}") for i in range(8)]
entries = {record["asin"]: catalogs.make_entry("soft") for record in records}
build_store(catalogs.write(folder / "raw", records, entries), folder / "store", processes=1)
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
