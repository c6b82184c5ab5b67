"""``spear data get|verify code``, against files and a server of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spear_envs.code.benchmarks import BENCHMARKS
from tests.spear_envs.data import hub
from tests.spear_envs.data.hub import run, serve_hub, use_data_folder
from tests.spear_envs.data.server import Site, status, whole

LINES = b"".join(json.dumps({"Problem": f"Problem {i}?", "Answer": i}).encode() + b"\n" for i in range(30))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_data_folder(tmp_path / "data", monkeypatch) / "code"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serve_hub(monkeypatch) as site:
        yield site


def publish_source(site: Site, name: str, files: dict[str, bytes], *, lfs: bool = True) -> None:
    """Let the repository of a benchmark have these files, and another."""
    hub.publish(site, BENCHMARKS[name].repository, files, lfs=lfs)


@pytest.mark.parametrize("lfs", [True, False])
def test_aime_is_fetched_and_counted(data: Path, site: Site, capsys: pytest.CaptureFixture[str], lfs: bool) -> None:
    publish_source(site, "aime-2024", {"aime.jsonl": LINES}, lfs=lfs)
    code, out, err = run(capsys, "get", "code", "aime-2024")
    assert code == 0, err
    assert out.count("its SHA-256 is unknown") == (0 if lfs else 1)
    assert (data / "aime-2024" / "aime.jsonl").read_bytes() == LINES
    assert not (data / "aime-2024" / "README.md").exists()
    code, out, err = run(capsys, "verify", "code")
    assert code == 0 and "30 (30)" in out and "aime.jsonl is as it should be" in out, err
    (data / "aime-2024" / "aime.jsonl").write_bytes(LINES[:-2] + b" \n")
    code, out, err = run(capsys, "verify", "code")
    assert code == 1 and "is not the expected file" in out and "'spear data get code' fetches" in err


def test_problems_that_are_missing_are_told(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "aime.jsonl").write_bytes(LINES[: LINES.index(b"\n") + 1] * 2)
    code, _, err = run(capsys, "get", "code", "aime-2024", "--from", tmp_path / "given")
    assert code == 0, err
    code, out, err = run(capsys, "verify", "code", "aime-2024")
    assert code == 1 and "1 problems instead of 30" in out and "code: not all of it" in err


@pytest.mark.parametrize(("answer", "words"), [(status(404), "could not be downloaded"), (whole(b"[]"), "has no file")])
def test_a_repository_that_is_not_what_it_was(
    data: Path, site: Site, capsys: pytest.CaptureFixture[str], answer: Any, words: str
) -> None:
    publish_source(site, "dapo-math-17k", {})
    site.put(f"/api/datasets/{BENCHMARKS['dapo-math-17k'].repository}/tree/{hub.COMMIT}?recursive=true", answer)
    code, _, err = run(capsys, "get", "code")
    assert code == 1 and words in err and "browser" in err and err.count("\n") == 1
