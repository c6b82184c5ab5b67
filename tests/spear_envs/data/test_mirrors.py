from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, fetch_locked, transfer
from spear_envs.data.fetching import list_remote
from spear_envs.data.transfer import Patience
from spear_envs.search.data_cli import SOURCES
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import run, serve_hub, use_data_folder
from tests.spear_envs.data.server import Site, cut, page, ranged, status, whole

BODY = bytes(range(256)) * 100
SHA256 = hashlib.sha256(BODY).hexdigest()
PATH = "webshop/small/raw/items.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site) -> Path:
    use_data_folder(tmp_path / "data", monkeypatch)
    monkeypatch.setattr(transfer, "Patience", partial(Patience, attempts=2, first_wait=0.01))
    monkeypatch.setenv("SPEAR_MIRROR", f"{site.address}/m/")
    return tmp_path / "data"


def get(folder: Path, site: Site, *answers: Any, digest: str = SHA256, **known: Any) -> bytes:
    """Fetch a file from a mirror with such a lock."""
    site.put("/m/lock.json", whole(json.dumps({"revisions": {}, "files": {PATH: digest}}).encode()))
    site.put(f"/m/{PATH}", *answers)
    return fetch_locked(RemoteFile("items.json", "http://127.0.0.1:9/f", **known), (folder / PATH).parent).read_bytes()


def test_a_mirror_replaces_the_publisher_with_the_files_of_its_lock(folder: Path, site: Site) -> None:
    with pytest.raises(SpearError, match="could not be downloaded"):
        get(folder, site, whole(BODY[::-1]))
    assert not (folder / PATH).exists() and not (folder / "lock.json").exists()
    site.requests.clear()
    assert get(folder, site, cut(BODY, 10_000, ETag='"v1"'), ranged(BODY)) == BODY
    assert site.ranges() == [None, None, "bytes=10000-"]
    assert json.loads((folder / "lock.json").read_text())["files"] == {PATH: SHA256}


def test_what_is_pinned_counts_more_than_what_a_mirror_says(folder: Path, site: Site) -> None:
    with pytest.raises(SpearError, match="instead of 000000000000"):
        get(folder, site, ranged(BODY), sha256="0" * 64)
    assert get(folder, site, ranged(BODY), digest="0" * 64, sha256=SHA256) == BODY


@pytest.mark.parametrize("answer", [whole(b"no JSON"), whole(b"[]"), page("Sign in"), status(404)])
def test_a_mirror_without_a_lock(folder: Path, site: Site, answer: Any) -> None:
    site.put("/m/lock.json", answer)
    with pytest.raises(SpearError, match=r"/m/? has to serve|/m/lock.json"):
        fetch_locked(RemoteFile("items.json"), folder / "x")


def test_a_lock_with_odd_entries(folder: Path, site: Site) -> None:
    names = ("search/", "search//x", "search/.", "search/../x", "/etc/x", "search/x\0", "search/\ud800", "search/good")
    files = dict.fromkeys(names, SHA256)
    site.put("/m/lock.json", whole(json.dumps({"revisions": {}, "files": files}).encode()))
    assert [name for _, name in list_remote("owner/name", folder / "search", ".*")] == ["good"]
    with pytest.raises(SpearError, match=r"/m/lock\.json is not a lock"):
        get(folder, site, whole(BODY), digest="0" * 40)  # as long as a commit


def test_a_hub_with_odd_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_data_folder(tmp_path, monkeypatch)
    others = [{"rfilename": name, "size": 1} for name in ("../x", "a/../../x", "/x", "a//x", "x\0")]
    with serve_hub(monkeypatch) as hub_site:
        hub.publish(hub_site, "owner/name", {"good": BODY}, others)
        assert [name for _, name in list_remote("owner/name", tmp_path / "search", "good|.*x")] == ["good"]
        for size in ("much", 10**400, -1):
            hub.publish(hub_site, "owner/odd", {}, [{"rfilename": "x", "size": size}])
            with pytest.raises(SpearError, match="could not be listed"):
                list_remote("owner/odd", tmp_path / "search", "x")


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """Another's data folder, with files of the hub as they are, unpacked and joined."""
    rows = b"".join(json.dumps({"Problem": f"Problem {i}?", "Answer": i}).encode() + b"\n" for i in range(30))
    with serve_hub(monkeypatch) as site:
        hub.publish(site, "Maxwell-Jia/AIME_2024", {"data/aime.jsonl": rows, "data/other.jsonl": rows})
        hub.publish(site, SOURCES["wiki-18"].repository, {"wiki-18.jsonl.gz": gzip.compress(b"{}\n")})
        hub.publish(site, SOURCES["e5-flat"].repository, {"part_aa": b"a" * 1_000, "part_ab": b"b"})
        use_data_folder(tmp_path / "theirs", monkeypatch)
        for command in (("code", "aime-2024"), ("search", "wiki-18", "e5-flat")):
            assert run(capsys, "get", *command)[0] == 0
    yield tmp_path / "theirs"


def test_from_one_data_folder_to_another(
    theirs: Path, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in theirs.rglob("*"):
        if path.is_file():
            site.put(f"/{path.relative_to(theirs)}", ranged(path.read_bytes()))
    ours = use_data_folder(tmp_path / "ours", monkeypatch)
    monkeypatch.setenv("SPEAR_MIRROR", site.address)
    for command in (("code", "aime-2024"), ("search", "wiki-18", "e5-flat")):
        code, _, err = run(capsys, "get", *command)
        assert code == 0, err
    assert (ours / "search" / "wiki-18" / "e5_Flat.index").read_bytes() == b"a" * 1_000 + b"b"
    for name in ("code/aime-2024", "search/wiki-18"):
        assert sorted(os.listdir(ours / name)) == sorted(os.listdir(theirs / name))
    assert run(capsys, "verify")[0] == 0
    code, _, err = run(capsys, "get", "code", "aime-2025")
    assert code == 1 and "has no file" in err
    monkeypatch.setenv("SPEAR_OFFLINE", "1")
    asked = len(site.requests)
    assert run(capsys, "get", "code", "aime-2025")[0] == 1
    assert len(site.requests) == asked
