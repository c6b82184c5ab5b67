"""Each data set against a server that fails, and against one whose files have changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("httpx", reason="downloads need the extra 'data'")

from spear_envs.data import transfer
from spear_envs.data.cli import DATASETS
from spear_envs.data.transfer import Patience
from spear_envs.search.data_cli import SOURCES
from tests.spear_envs.data.catalogue import PARTS, Part
from tests.spear_envs.data.hub import COMMIT, run, serve_hub, use_data_folder
from tests.spear_envs.data.server import Answer, Site, cut, page, ranged, status, whole

EACH = pytest.mark.parametrize("part", PARTS, ids=lambda part: "-".join(part.command))

QUICK = partial(Patience, attempts=3, first_wait=0.01, longest_wait=0.05)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(transfer, "Patience", QUICK)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    return use_data_folder(tmp_path / "data", monkeypatch)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serve_hub(monkeypatch) as site:
        yield site


class Published(NamedTuple):
    """A data set on the site: where its file lies, and the answer that gives it."""

    part: Part
    site: Site
    path: str
    good: Answer


@pytest.fixture
def published(part: Part, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Published:
    path = part.publish(site, monkeypatch, tmp_path / "made")
    (good,) = site.answers[path]
    return Published(part, site, path, good)


def read_body(answer: Answer) -> bytes:
    """What a good answer of :func:`ranged` would send."""
    return answer.__closure__[0].cell_contents  # type: ignore[attr-defined, no-any-return]


def test_no_data_set_is_left_out() -> None:
    assert {part.command[0] for part in PARTS} == {dataset.name for dataset in DATASETS}
    assert {part.command[1] for part in PARTS if part.command[0] == "search"} == set(SOURCES)


@EACH
def test_a_fault_leaves_no_file_a_cut_is_resumed_and_a_change_is_refused(
    published: Published, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command takes the way that test_fetching.py tries in full."""
    part, site, path, good = published
    body = read_body(good)
    site.put(path, page("Quota exceeded"))
    code, _, err = run(capsys, "get", *part.command)
    assert code == 1 and err.count("\n") == 1 and not (data / part.kept).exists(), err
    site.put(path, status(500), cut(body, len(body) // 2, ETag='"v1"'), good)
    code, _, err = run(capsys, "get", *part.command)
    assert code == 0 and site.ranges()[-1] == f"bytes={len(body) // 2}-", err
    lock = json.loads((data / "lock.json").read_text())
    listed = json.loads(run(capsys, "list", part.command[0], "--json")[1])["datasets"][0]["files"]
    entry = next(entry for entry in listed if entry["path"] == part.kept)
    assert entry["revision"] == next(iter(lock["revisions"].values()), None)
    assert entry["sha256"] == lock["files"][part.kept]
    there = path.rpartition(f"{COMMIT}/")[2].lstrip("/")
    (name,) = (name for name in lock["files"] if name.endswith(f"/{there}"))
    if name == part.kept:
        assert lock["files"][name] == entry["sha256"]
    for item in data.rglob(f"{Path(part.kept).name}*"):
        item.unlink()  # with the record beside it, as one would to fetch it anew
    changed = bytearray(body)
    changed[200] ^= 1
    site.put(path, whole(bytes(changed)))
    code, _, err = run(capsys, "get", *part.command)
    assert code == 1 and err.count("\n") == 1 and f"'spear data unlock {name}' accepts the change" in err, err
    assert not (data / part.kept).exists()
    site.put(path, good)
    assert run(capsys, "get", *part.command)[0] == 0, "as it was"


def test_an_accepted_change_is_locked(
    data: Path, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = next(part for part in PARTS if part.command == ("webshop", "--size", "small", "--human"))
    path = part.publish(site, monkeypatch, tmp_path / "made")
    assert run(capsys, "get", *part.command)[0] == 0
    before = json.loads((data / "lock.json").read_text())["files"]
    for item in (data / part.kept).parent.glob(f"{Path(part.kept).name}*"):
        item.unlink()
    changed = b"{" + b" " * 7 + b"}"
    site.put(path, ranged(changed))
    assert run(capsys, "get", *part.command)[0] == 1
    code, out, _ = run(capsys, "unlock", part.kept)
    assert (code, out) == (0, f"{part.kept}\n")
    assert run(capsys, "get", *part.command)[0] == 0 and (data / part.kept).read_bytes() == changed
    after = json.loads((data / "lock.json").read_text())["files"]
    assert {name for name in after if after[name] != before[name]} == {part.kept}
    code, _, err = run(capsys, "unlock", "webshop/small/raw/nothing")
    assert code == 1 and "nothing is locked under" in err
    assert run(capsys, "unlock", "webshop")[1].split() == sorted(before)
