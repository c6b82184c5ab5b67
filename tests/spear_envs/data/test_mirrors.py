from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, fetch
from spear_envs.data.mirrors import MANIFEST, Mirror, add_mirrors, find_mirrored, open_mirrors
from spear_envs.data.transfer import Patience
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import run, serve_hub
from tests.spear_envs.data.server import QuietServer, Site, cut, page, ranged, status, whole

QUICK = Patience(attempts=2, first_wait=0.01, longest_wait=0.05, connect_timeout=5, read_timeout=5)
BODY = bytes(range(256)) * 100
SHA256 = hashlib.sha256(BODY).hexdigest()
PATH = "webshop/small/raw/items.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return hub.use_data_folder(tmp_path / "data", monkeypatch)


def write_manifest(files: dict[str, bytes], **changes: Any) -> bytes:
    entries = [
        {"path": path, "state": "present", "size": len(body), "sha256": hashlib.sha256(body).hexdigest(), **changes}
        for path, body in files.items()
    ]
    return json.dumps({"datasets": [{"name": "any", "files": entries}]}).encode()


def keep_mirror(site: Site, name: str, *answers: Any) -> str:
    """A mirror with one file, which it gives in these ways."""
    site.put(f"/{name}/{MANIFEST}", whole(write_manifest({PATH: BODY})))
    site.put(f"/{name}/{PATH}", *answers)
    return f"{site.address}/{name}/"


def get(folder: Path, site: Site, *addresses: str, **known: Any) -> bytes:
    """Fetch the file with these mirrors before its publisher, who no longer has it."""
    file = RemoteFile("items.json", (site.put("/origin", status(404)),), **known)
    place = folder / "webshop" / "small" / "raw"
    return fetch(add_mirrors(file, place, open_mirrors(addresses, None, QUICK)), place, patience=QUICK).read_bytes()


def test_a_mirror_is_asked_first(folder: Path, site: Site) -> None:
    assert get(folder, site, keep_mirror(site, "good", ranged(BODY))) == BODY
    assert [path for path, _ in site.requests] == [f"/good/{MANIFEST}", f"/good/{PATH}"]


def test_one_after_the_other(folder: Path, site: Site) -> None:
    bad = [
        keep_mirror(site, "gone", status(404)),
        keep_mirror(site, "page", page("Sign in")),
        keep_mirror(site, "wrong", whole(BODY[::-1])),
        keep_mirror(site, "long", whole(BODY + b"!")),
        keep_mirror(site, "lies", lambda handler: handler.say(200, BODY, length=len(BODY) - 1)),
    ]
    breaks_off = keep_mirror(site, "cut", cut(BODY, 10_000, ETag='"v1"'), ranged(BODY))
    assert get(folder, site, *bad, breaks_off) == BODY
    assert site.ranges()[-2:] == [None, "bytes=10000-"]
    assert not any(path == "/origin" for path, _ in site.requests)


def test_what_is_pinned_counts_more_than_what_a_mirror_says(folder: Path, site: Site) -> None:
    pinned = hashlib.sha256(BODY[::-1]).hexdigest()
    with pytest.raises(SpearError, match=f"instead of {pinned[:12]}"):
        get(folder, site, keep_mirror(site, "good", ranged(BODY)), sha256=pinned)
    with pytest.raises(SpearError, match=f"25,600 bytes instead of {len(BODY) + 1:,}"):
        get(folder, site, keep_mirror(site, "good", ranged(BODY)), size=len(BODY) + 1)


def test_without_one_that_has_it_the_publisher_is_asked(folder: Path, site: Site) -> None:
    site.put("/origin", whole(BODY))
    place = folder / "webshop" / "full" / "raw"
    file = RemoteFile("items.json", (f"{site.address}/origin",))
    assert add_mirrors(file, place, open_mirrors([keep_mirror(site, "good", whole(BODY))])) is file


@pytest.mark.parametrize(
    "manifest",
    [
        whole(b"no JSON"),
        whole(b"[]"),
        whole(write_manifest({"../../etc/passwd": BODY})),
        whole(write_manifest({"/etc/passwd": BODY})),
        whole(write_manifest({PATH: BODY}, size="many")),
        page("Sign in"),
        status(404),
    ],
    ids=["text", "list", "above", "absolute", "size", "page", "absent"],
)
def test_a_mirror_without_a_manifest_is_left_out(site: Site, manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    site.put(f"/m/{MANIFEST}", manifest)
    assert open_mirrors([f"{site.address}/m"], Console(), QUICK) == ()
    assert "/m is left out: " in capsys.readouterr().out


def test_only_what_is_whole_there_counts(site: Site) -> None:
    for changes in ({"state": "partial"}, {"sha256": None}):
        site.put(f"/m/{MANIFEST}", whole(write_manifest({PATH: BODY}, **changes)))
        (mirror,) = open_mirrors([f"{site.address}/m"])
        assert not mirror.files


def test_files_that_only_a_listing_names(folder: Path) -> None:
    files = {path: (1, SHA256) for path in ("search/a/nq/test.jsonl", "search/a/README", "search/ab/test.jsonl")}
    mirrors = [Mirror("http://one", {}), Mirror("http://two", files)]
    ((file, path),) = find_mirrored(mirrors, folder / "search" / "a", r".*\.jsonl")
    assert (file.name, path, file.urls) == ("test.jsonl", "nq/test.jsonl", ("http://two/search/a/nq/test.jsonl",))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Another's data folder, served by the standard library's server: the folder and its address."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    server = QuietServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", ["option", "variable"])
def test_from_one_data_folder_to_another(
    mirror: tuple[Path, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    theirs, address = mirror
    rows = b"".join(json.dumps({"Problem": f"Problem {i}?", "Answer": i}).encode() + b"\n" for i in range(30))
    with serve_hub(monkeypatch) as site:
        hub.publish(site, "Maxwell-Jia/AIME_2024", {"aime.jsonl": rows})
        monkeypatch.setenv("SPEAR_DATA", str(theirs))
        assert run(capsys, "get", "code", "aime-2024")[0] == 0
        (theirs / MANIFEST).write_text(run(capsys, "list", "--json")[1])
        asked = len(site.requests)

        monkeypatch.setenv("SPEAR_DATA", str(folder))
        options = ["--mirror", address] if how == "option" else []
        if how == "variable":
            monkeypatch.setenv("SPEAR_MIRROR", address)
        code, _, err = run(capsys, "get", "code", "aime-2024", *options)
        assert code == 0, err
        assert len(site.requests) == asked, "the hub is not needed"
        assert (folder / "code" / "aime-2024" / "aime.jsonl").read_bytes() == rows
        assert run(capsys, "verify", "code")[0] == 0

        (theirs / "code" / "aime-2024" / "aime.jsonl").write_bytes(rows[::-1])
        monkeypatch.setenv("SPEAR_DATA", str(folder / "again"))
        code, _, err = run(capsys, "get", "code", "aime-2024", *options)
        assert code == 1 and "it sends another file" in err and "aime.jsonl could not be downloaded" in err
