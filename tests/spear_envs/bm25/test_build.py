"""Building on disk: what an interruption leaves, what opening refuses, and that the result is the index in memory."""

import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_envs.bm25 import build
from spear_envs.bm25.build import build_index
from spear_envs.bm25.files import ARRAYS, MANIFEST, map_index
from spear_envs.bm25.index import SearchIndex
from spear_envs.bm25.packing import pack_postings
from spear_envs.bm25.postings import make_postings
from spear_envs.core.errors import SpearError

TEXTS = [f"{'red' if i % 3 else 'blue'} shirt number{i} " + "large " * (i % 5) for i in range(60)]
TEXTS[7] = ""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHUNK_DOCUMENTS", 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An index of three texts."""
    build_index(["red dress", "blue dress", "red shirt"], tmp_path / "index", processes=1)
    return tmp_path / "index"


def assert_same_as_in_memory(folder: Path, texts: list[str]) -> None:
    made, expected = map_index(folder), pack_postings(make_postings(texts))
    for field in fields(expected):
        a, b = getattr(made, field.name), getattr(expected, field.name)
        assert np.array_equal(a, b), field.name
        assert np.asarray(a).dtype == np.asarray(b).dtype, field.name


@pytest.mark.parametrize("processes", [1, 2])
def test_chunks_make_the_index_of_all_texts(small_chunks: None, tmp_path: Path, processes: int) -> None:
    seen: list[int] = []
    build_index(iter(TEXTS), tmp_path / "index", processes=processes, on_progress=seen.append)
    assert seen == [10, 20, 30, 40, 50, 60]
    assert_same_as_in_memory(tmp_path / "index", TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert SearchIndex.open(tmp_path / "index").search("blue") == SearchIndex.in_memory(TEXTS).search("blue")


@settings(max_examples=30)
@given(
    st.lists(st.text(st.sampled_from("ab cs'é漢 \ud800"), max_size=20), max_size=25),
    st.integers(1, 30),
    st.sampled_from([1, 2, 7, 1_000]),
)
def test_any_texts_chunks_and_stretches(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], characters: int, pairs: int
) -> None:
    folder = tmp_path_factory.mktemp("any") / "index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "CHUNK_CHARACTERS", characters)
        patch.setattr(build, "STRETCH_PAIRS", pairs)
        build_index(texts, folder, processes=1)
    assert_same_as_in_memory(folder, texts)
    shutil.rmtree(folder.parent)


def fail_after(count: int) -> Iterator[str]:
    yield from TEXTS[:count]
    raise RuntimeError("the reader failed")


def count_analysed(monkeypatch: pytest.MonkeyPatch, texts: list[str], folder: Path) -> int:
    """Build in this process and count the chunks that were analysed."""
    made: list[Path] = []
    write = build.index_chunk

    def count(job: build.Job) -> tuple[Path, int]:
        path, _size, texts_of_chunk = job
        if texts_of_chunk:
            made.append(path)
        return write(job)

    monkeypatch.setattr(build, "index_chunk", count)
    build_index(texts, folder, processes=1)
    monkeypatch.setattr(build, "index_chunk", write)
    return len(made)


def test_an_interrupted_build_goes_on(small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "index"
    with pytest.raises(RuntimeError, match="reader failed"):
        build_index(fail_after(35), folder, processes=1)
    with pytest.raises(SpearError, match="not hold a finished search index"):
        SearchIndex.open(folder)
    assert count_analysed(monkeypatch, TEXTS, folder) == 3
    assert_same_as_in_memory(folder, TEXTS)


def test_chunks_of_other_texts_are_not_taken(
    small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    with pytest.raises(RuntimeError):
        build_index(fail_after(35), folder, processes=1)
    changed = [*TEXTS[:12], "another text", *TEXTS[13:]]
    assert count_analysed(monkeypatch, changed, folder) == 4
    assert_same_as_in_memory(folder, changed)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_chunks_are_made_again(
    small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = tmp_path / "index"
    with pytest.raises(RuntimeError):
        build_index(fail_after(35), folder, processes=1)
    path = sorted((tmp_path / "index.partial").glob("*.chunk"))[0]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    path.write_bytes({"truncate": content[: len(content) // 2], "flip": content, "empty": b""}[damage])
    assert count_analysed(monkeypatch, TEXTS, folder) == 4
    assert_same_as_in_memory(folder, TEXTS)


BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from spear_envs.bm25 import build
build.CHUNK_DOCUMENTS = 10
def texts():
    for i in range(400):
        yield f"red shirt number{i}"
        if i == 200:
            print("half", flush=True)
            time.sleep(60)
if __name__ == "__main__":
    build.build_index(texts(), Path(sys.argv[1]))
"""


def find_children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_build_leaves_no_processes_and_goes_on(
    small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    (tmp_path / "slow.py").write_text(BUILD_SLOWLY)
    process = subprocess.Popen([sys.executable, str(tmp_path / "slow.py"), str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "index.partial").glob("*.chunk"))) < 17 and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(SpearError, match="another process is building"):
        build_index(["x"], folder)
    children = find_children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert children
    while not all(map(has_ended, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, children))
    texts = [f"red shirt number{i}" for i in range(400)]
    assert count_analysed(monkeypatch, texts, folder) <= 40 - 17
    assert_same_as_in_memory(folder, texts)


def test_a_killed_worker_is_one_clear_error(small_chunks: None, tmp_path: Path) -> None:
    def kill_workers_on_the_way() -> Iterator[str]:
        yield from TEXTS[:35]
        for worker in multiprocessing.active_children():
            worker.kill()
        yield from TEXTS[35:]

    with pytest.raises(SpearError, match="run the same command again"):
        build_index(kill_workers_on_the_way(), tmp_path / "index")
    assert not multiprocessing.active_children()
    build_index(TEXTS, tmp_path / "index", processes=1)
    assert_same_as_in_memory(tmp_path / "index", TEXTS)


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SpearError, match="not a search index"):
        build_index(TEXTS, tmp_path)
    with pytest.raises(SpearError, match="not a search index"):
        build_index(TEXTS, tmp_path / "notes.txt")
    (tmp_path / "manifest.json").write_text('{"name": "my app"}')
    with pytest.raises(SpearError, match="not a search index"):
        build_index(TEXTS, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from spear_envs.core.errors import SpearError
from spear_envs.bm25.build import build_index
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    build_index((f"red shirt number{i}" for i in range(5_000)), Path(sys.argv[1]), processes=1)
except SpearError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "run the same command again" in done.stdout, done.stderr
    assert not (tmp_path / "index").exists()


def test_a_new_index_takes_the_place_of_the_old(folder: Path) -> None:
    old = SearchIndex.open(folder)
    build_index(["green hat"], folder, processes=1)
    assert SearchIndex.open(folder).search("hat") == [0]
    assert old.search("dress") == [0, 1]  # what is open stays readable
    assert [path.name for path in folder.parent.iterdir()] == ["index"]
    (folder.parent / "empty").mkdir()
    build_index([], folder.parent / "empty")
    assert SearchIndex.open(folder.parent / "empty").search("red") == []


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", '{"format": "spear-bm25-index"', "\udcff"])
def test_manifests_that_are_none_are_refused(folder: Path, content: str | None) -> None:
    if content is None:
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SpearError, match="build it again"):
        SearchIndex.open(folder)


def test_files_of_two_indexes_do_not_mix(folder: Path, tmp_path: Path) -> None:
    build_index(["green hat"], tmp_path / "other", processes=1)
    manifest = json.loads((folder / MANIFEST).read_text()) | {"checksum": None}
    for name in ("starts.bin", "frequencies.bin"):
        shutil.copy(tmp_path / "other" / name, folder / name)
        manifest["files"][name]["bytes"] = (folder / name).stat().st_size
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SpearError, match="do not belong together"):
        SearchIndex.open(folder)


@pytest.mark.parametrize("spread", [1_000, -1, 2**61, None])
def test_numbers_that_no_index_has_are_one_clear_error(folder: Path, spread: int | None) -> None:
    path = folder / ("lasts.bin" if spread is None else "starts.bin")
    size = path.stat().st_size
    path.write_bytes(b"\xff" * size if spread is None else (np.arange(size // 8) * spread).astype("<i8").tobytes())
    with pytest.raises(SpearError, match="damaged"):
        SearchIndex.open(folder).search("dress")


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_files_of_another_size_are_refused(folder: Path, name: str, damage: str) -> None:
    path = folder / f"{name}.bin"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "short" else content + b"\0")
    with pytest.raises(SpearError, match="build it again"):
        SearchIndex.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version is 1, not 3: build it again"),
        ({"version": None}, "version is None"),
        ({"format": "other"}, "is not of a search index"),
        ({"files": []}, "cannot be read"),
        ({"files": {"norms.bin": 3}}, "cannot be read"),
        ({"terms_total": "many"}, "damaged"),
        ({"terms_total": float("inf")}, "damaged"),
        ({"terms_total": 10**400}, "do not belong together"),
        ({"terms_total": -5}, "do not belong together"),
        ({"filled": None}, "damaged"),
        ({"filled": -100}, "do not belong together"),
        ({"filled": 4}, "do not belong together"),
    ],
)
def test_manifests_that_say_something_else_are_refused(folder: Path, change: dict[str, object], message: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text()) | change | {"checksum": None}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SpearError, match=message):
        SearchIndex.open(folder)


def test_arrays_are_mapped_read_only(folder: Path) -> None:
    packed = map_index(folder)
    with pytest.raises(ValueError, match="read-only"):
        packed.data[0] = 1
