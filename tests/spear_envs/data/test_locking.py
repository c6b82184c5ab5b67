from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="downloads need the extra 'data'")

from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, data_folder, fetch_locked, fetching
from spear_envs.data.cli import DATASETS
from spear_envs.data.fetching import find_digest, find_revision, list_remote, record_revision, unlock
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import serve_hub, use_data_folder
from tests.spear_envs.data.server import Site, ranged, status, whole

NEWER = "beef" + "1" * 36
REPOSITORY = "owner/name"
BODY = b"one two three"
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_data_folder(tmp_path / "data", monkeypatch)


def test_a_file_is_locked_when_it_first_comes(data: Path, site: Site) -> None:
    file = RemoteFile("a.json", site.put("/a", ranged(BODY)))
    fetch_locked(file, data / "x")
    assert json.loads((data / "lock.json").read_text()) == {"revisions": {}, "files": {"x/a.json": SHA256}}
    assert find_digest(data / "x" / "a.json") == SHA256
    (data / "x" / "a.json").unlink()
    site.put("/a", ranged(BODY[::-1]))
    with pytest.raises(SpearError, match=r"'spear data unlock x/a.json' accepts the change"):
        fetch_locked(file, data / "x")
    (data / "mine.json").write_bytes(BODY[::-1])
    with pytest.raises(SpearError, match=r"mine.json is not the expected file .* 'spear data unlock x/a.json'"):
        fetch_locked(file, data / "x", source=data / "mine.json")


def test_a_publisher_that_says_so_itself_is_refused_at_once(data: Path, site: Site) -> None:
    url = site.put("/a", ranged(BODY))
    fetch_locked(RemoteFile("a.json", url), data)
    (data / "a.json").unlink()
    with pytest.raises(SpearError, match=f"its SHA-256 is {'0' * 12}…. It was {SHA256[:12]}… when it was locked"):
        fetch_locked(RemoteFile("a.json", url, sha256="0" * 64), data)
    assert len(site.requests) == 1


def test_what_cannot_be_the_file_is_not_locked(data: Path, site: Site) -> None:
    file = RemoteFile("a.json", site.put("/a", ranged(BODY)))

    def refuse(path: Path) -> None:
        assert path.read_bytes() == BODY
        raise SpearError("no such file")

    with pytest.raises(SpearError, match="no such file"):
        fetch_locked(file, data / "x", check=refuse)
    assert not any((data / "x").iterdir()) and not (data / "lock.json").exists()
    fetch_locked(file, data / "x")
    with pytest.raises(SpearError, match="no such file"):
        fetch_locked(file, data / "x", check=refuse)
    assert (data / "x" / "a.json").exists(), "one that was here before is not deleted"


def test_unlocking_forgets_what_is_known_beforehand_too(data: Path) -> None:
    (path,) = json.loads(fetching.KNOWN.read_text())["files"]
    assert find_digest(data / path) is not None
    record_revision(REPOSITORY, hub.COMMIT)
    assert unlock("webshop/small", [REPOSITORY, "other/name"]) == [REPOSITORY, path]
    assert find_digest(data / path) is None and find_revision(REPOSITORY) is None
    assert unlock("webshop/small", [REPOSITORY]) == [] and unlock("web") == []


def test_what_is_known_beforehand_is_of_the_catalogue() -> None:
    known = json.loads(fetching.KNOWN.read_text())
    expected = [item for dataset in DATASETS for item in dataset.load("expect_files")()]
    assert known["files"].keys() <= {item.path for item in expected}
    assert known["revisions"].keys() <= {item.repository for item in expected}
    for digest in known["files"].values():
        RemoteFile("a", sha256=digest)


@pytest.mark.parametrize(
    "junk",
    [
        b"{",
        b"[]",
        b'{"files": {}}',
        b'{"revisions": [], "files": {}}',
        b'{"revisions": {"a": 1}, "files": {}}',
        b'{"revisions": {}, "files": {"a": "b"}}',
    ],
)
def test_a_lock_that_is_none(data: Path, junk: bytes) -> None:
    data.mkdir()
    (data / "lock.json").write_bytes(junk)
    with pytest.raises(SpearError, match="is not a lock of revisions and digests"):
        find_revision(REPOSITORY)
    with pytest.raises(SpearError, match="is not a lock of revisions and digests"):
        record_revision(REPOSITORY, hub.COMMIT)
    assert (data / "lock.json").read_bytes() == junk


PROGRAM = """
import sys
from spear_envs.data.fetching import record_revision
for number in range(40):
    record_revision(f"{sys.argv[1]}/{number}", "c0" * 20)
"""


def test_processes_lock_side_by_side(data: Path, root: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM, name], cwd=root) for name in "ab"]
    assert [process.wait(120) for process in running] == [0, 0]
    assert len(json.loads((data / "lock.json").read_text())["revisions"]) == 80


def list_paths(pattern: str = ".*") -> list[str]:
    return [path for _, path in list_remote(REPOSITORY, data_folder() / "x", pattern)]


def test_a_repository_is_read_at_its_locked_commit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub(monkeypatch) as site:
        hub.publish(site, REPOSITORY, {"a.txt": BODY, "d/c 1.txt": BODY})
        with pytest.raises(SpearError, match="has no file b"):
            list_paths("b")
        assert find_revision(REPOSITORY) is None, "only what could be listed is locked"
        ((file, path),) = list_remote(REPOSITORY, data, "d/.*")
        assert path == "d/c 1.txt" and file.url.endswith(f"/resolve/{hub.COMMIT}/d/c%201.txt")
        assert find_revision(REPOSITORY) == hub.COMMIT
        hub.publish(site, REPOSITORY, {"b.txt": BODY}, commit=NEWER)
        assert list_paths(r"\w\.txt") == ["a.txt"]
        unlock("", [REPOSITORY])
        assert list_paths(r"\w\.txt") == ["b.txt"] and find_revision(REPOSITORY) == NEWER
        site.put(hub.locate_listing(REPOSITORY, NEWER), status(404))
        with pytest.raises(SpearError, match=f"'spear data unlock {REPOSITORY}' reads the newest"):
            list_paths()


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"sha": 1}', b'{"sha": "main"}', b'{"sha": "../../../etc"}'])
def test_a_commit_that_is_none(data: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    with serve_hub(monkeypatch) as site:
        site.put(hub.locate_listing(REPOSITORY), whole(answer))
        with pytest.raises(SpearError, match="could not be listed"):
            list_paths()
        monkeypatch.setenv("SPEAR_OFFLINE", "1")
        with pytest.raises(SpearError, match="SPEAR_OFFLINE"):
            list_paths()
    assert not (data / "lock.json").exists()
