"""``spear data get|verify search``, against files and a server of our own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spear_envs.search.benchmarks import BENCHMARKS
from spear_envs.search.data_cli import SOURCES
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import run, serve_hub, use_data_folder
from tests.spear_envs.data.server import Site, cut, page, ranged, status, whole

LINES = b"".join(
    json.dumps({"id": str(i), "question": f"question {i}?", "golden_answers": ["x"]}).encode() + b"\n" for i in range(5)
)
PARTS = {"part_aa": b"a" * 100_000, "part_ab": b"b" * 50_000, "part_ac": b"c"}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_data_folder(tmp_path / "data", monkeypatch) / "search"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serve_hub(monkeypatch) as site:
        yield site


def publish_source(site: Site, name: str, files: dict[str, bytes], *, lfs: bool = True) -> None:
    """Let the repository of a source have these files, and some others."""
    others = (
        {"type": "directory", "path": "nq", "oid": "0", "size": 0},
        {"type": "file", "path": "nq/train.jsonl", "oid": "0", "size": 10**9, "lfs": {"oid": "0", "size": 10**9}},
    )
    hub.publish(site, SOURCES[name].repository, files, others, lfs=lfs)


@pytest.mark.parametrize("lfs", [True, False])
def test_the_questions_of_the_benchmarks(data: Path, site: Site, capsys: pytest.CaptureFixture[str], lfs: bool) -> None:
    publish_source(site, "questions", {item.path: LINES for item in BENCHMARKS}, lfs=lfs)
    code, out, err = run(capsys, "get", "search")
    assert code == 0, err
    assert out.count("its SHA-256 is unknown") == (0 if lfs else 7)
    assert (data / "flashrag" / "hotpotqa" / "dev.jsonl").read_bytes() == LINES
    assert not (data / "flashrag" / "nq" / "train.jsonl").exists()
    asked = len(site.requests)
    assert run(capsys, "get", "search", "questions")[0] == 0
    assert len(site.requests) == asked + 1, "the listing of the locked commit; whole files are kept"
    code, out, err = run(capsys, "verify", "search")
    assert code == 1 and "search: not all of it is as it should be" in err
    assert "nq/test: 5 questions instead of 3,610" in out and "dev.jsonl is as it should be" in out
    (data / "flashrag" / "nq" / "test.jsonl").write_bytes(LINES[:-1] + b" ")
    code, out, _ = run(capsys, "verify", "search", "questions")
    assert code == 1 and "is not the expected file" in out and "dev.jsonl is as it should be" in out


def test_parts_are_joined_and_a_cut_download_goes_on(
    data: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_source(site, "e5-flat", PARTS)
    url = f"/datasets/{SOURCES['e5-flat'].repository}/resolve/{hub.COMMIT}/part_ab"
    site.put(url, cut(PARTS["part_ab"], 20_000, ETag='"v1"'), ranged(PARTS["part_ab"]))
    code, _, err = run(capsys, "get", "search", "e5-flat")
    assert code == 0, err
    target = data / "wiki-18" / "e5_Flat.index"
    assert target.read_bytes() == b"".join(PARTS.values())
    assert "bytes=20000-" in site.ranges()
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name, f"{target.name}.parts.json"]
    asked = len(site.requests)
    assert run(capsys, "get", "search", "e5-flat")[0] == 0
    assert len(site.requests) == asked, "it is there"
    assert run(capsys, "verify", "search", "e5-flat")[0] == 0
    target.write_bytes(target.read_bytes()[:-1] + b"x")
    code, out, _ = run(capsys, "verify", "search")
    assert code == 1 and "part_ac" in out


def test_the_corpus_is_unpacked(data: Path, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = b'{"id": "0", "contents": "\\"T\\"\\ntext"}\n' * 1_000
    publish_source(site, "wiki-18", {"wiki-18.jsonl.gz": gzip.compress(corpus)})
    code, _, err = run(capsys, "get", "search", "wiki-18")
    assert code == 0, err
    target = data / "wiki-18" / "wiki-18.jsonl"
    assert target.read_bytes() == corpus
    assert not (data / "wiki-18" / "wiki-18.files").exists()
    assert run(capsys, "verify", "search", "wiki-18")[0] == 0
    target.write_bytes(corpus[:-1] + b" ")
    assert run(capsys, "verify", "search", "wiki-18")[0] == 1


def test_files_at_hand(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "given"
    for item in BENCHMARKS:
        (given / item.path).parent.mkdir(parents=True)
        (given / item.path).write_bytes(LINES)
    code, _, err = run(capsys, "get", "search", "--from", given)
    assert code == 0, err
    assert (data / "flashrag" / "musique" / "dev.jsonl").read_bytes() == LINES
    assert (given / "musique" / "dev.jsonl").exists()
    given.joinpath("part_aa").write_bytes(b"vectors")
    assert run(capsys, "get", "search", "e5-flat", "--from", given)[0] == 0
    code, out, _ = run(capsys, "verify", "search", "e5-flat")
    assert code == 0 and "panel" not in out, "questions that are missing are not fault of the index"
    code, _, err = run(capsys, "get", "search", "train", "--from", given)
    assert code == 1 and "name the folder that does" in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(404), "could not be downloaded"),
        (whole(b"[]"), "has no file"),
        (whole(b'{"error": "gone"}'), "does not list files"),
        (whole(b'[{"type": "file", "path": "nq/test.jsonl"}]'), "does not list files"),
        (page("Sign in"), "could not be downloaded|does not list files"),
    ],
)
def test_a_repository_that_is_not_what_it_was(
    data: Path, site: Site, capsys: pytest.CaptureFixture[str], answer: Any, words: str
) -> None:
    publish_source(site, "questions", {})
    site.put(f"/api/datasets/{SOURCES['questions'].repository}/tree/{hub.COMMIT}?recursive=true", answer)
    code, _, err = run(capsys, "get", "search")
    assert code == 1 and any(word in err for word in words.split("|"))
    assert "browser" in err and err.count("\n") == 1
