"""Where data lies, rows of its files, folders that are replaced, and what comes with the package."""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import canonical_json
from spear_envs.data import RemoteFile, data_folder, is_offline
from spear_envs.data.embedded import read_embedded
from spear_envs.data.files import draft_folder
from spear_envs.data.processes import explain_build, replace_folder
from spear_envs.data.rows import MalformedRowError, parse_rows
from spear_envs.doctor import check_disk, examine
from tests.commands import ROOT


def test_where_data_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_folder() == tmp_path / ".cache" / "spear-envs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_folder() == tmp_path / ".cache" / "spear-envs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "spear-envs"
    monkeypatch.setenv("SPEAR_DATA", "~/mine")
    assert data_folder() == tmp_path / "mine"
    monkeypatch.setenv("SPEAR_DATA", "here")
    assert data_folder() == Path.cwd() / "here"


def test_a_user_without_a_home_is_told_where_to_put_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the number that a scheduler runs as, which the machine's list of users lacks."""
    for name in ("HOME", "XDG_CACHE_HOME", "SPEAR_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(SpearError, match="SPEAR_DATA"):
        data_folder()
    (found,) = examine(check_disk)
    assert "SPEAR_DATA" in found.found and "bug" not in found.mend


@pytest.mark.parametrize(
    ("value", "offline"), [("1", True), ("yes", True), ("0", False), ("", False), ("False", False)]
)
def test_offline(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.setenv("SPEAR_OFFLINE", value)
    assert is_offline() is offline


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a"])
def test_a_name_is_one_component(name: str) -> None:
    with pytest.raises(ValueError, match="not a file name"):
        RemoteFile(name)


@pytest.mark.parametrize("sha256", ["", "abc", "A" * 64])
def test_a_checksum_is_hex(sha256: str) -> None:
    with pytest.raises(ValueError, match="not a SHA-256"):
        RemoteFile("a", sha256=sha256)


def parse(row: Mapping[str, Any], number: int) -> tuple[int, str]:
    if "name" not in row:
        raise MalformedRowError("it has no name")
    return number, row["name"]


def read(path: Path, content: str) -> list[tuple[int, str]]:
    path.write_text(content, "utf-8")
    return list(parse_rows(path, "search", parse, noun="person", example='{"name": "Ada"}'))


def test_rows_are_parsed_in_order(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", '{"name": "Ada"}\n\n{"name": "Zoë"}') == [(1, "Ada"), (2, "Zoë")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"name": "Ada"}\n{}',
            r"row 2: this is not a person \(it has no name\)\. A row of \.jsonl looks like {\"name\"",
        ),
        ("3", r"row 1: this is not a person \(it is not an object\)"),
        ("", "has no persons: fetch or write it again"),
        ('{"name": "Ada"}\n{', "line 2 cannot be read"),
    ],
)
def test_a_file_that_cannot_be_parsed_names_the_row(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(SpearError, match=rf"a\.jsonl.* ?{said}"):
        read(tmp_path / "a.jsonl", content)


def test_a_process_with_the_number_of_a_killed_one_makes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in every container
    killed = draft_folder(tmp_path / "policy")
    draft = killed.__enter__()
    (draft / "one").touch()
    with draft_folder(tmp_path / "policy") as again:
        (again / "two").touch()
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["two"]
    assert (draft / "one").exists(), "it may be at work in another container"


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "index"
    for content in ("first", "second", "third"):
        fresh = work / "fresh"
        fresh.mkdir(parents=True)
        (fresh / content).touch()
        replace_folder(fresh, folder, work)
        assert [path.name for path in folder.iterdir()] == [content]
        assert not fresh.exists()
    assert [path.name for path in (work / "replaced").iterdir()] == ["second"]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (BrokenProcessPool("gone"), "a process that built the store X ended .killed for want of memory"),
        (OSError(errno.ENOSPC, "No space left"), "the store X could not be built .*No space left"),
        (KeyError("k"), "the store X could not be built .'k'"),
    ],
)
def test_a_build_that_fails_says_that_it_can_go_on(raised: Exception, said: str) -> None:
    with (
        pytest.raises(SpearError, match=f"^{said}.*: fix that and run the same command again, which resumes.$"),
        explain_build("the store X", (OSError, KeyError)),
    ):
        raise raised


def test_what_is_no_fault_of_a_build_passes() -> None:
    with pytest.raises(ZeroDivisionError), explain_build("the store X"):
        raise ZeroDivisionError


FOLDER = ROOT / "spear_envs" / "data" / "embedded"


@pytest.mark.parametrize("name", ["code", "search", "webshop"])
def test_a_data_set_is_the_one_that_its_fingerprint_names(name: str) -> None:
    content = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    assert content["license"] == "Apache-2.0" and all(content["counts"].values())
    assert hashlib.sha256(canonical_json(read_embedded(name)).encode()).hexdigest() == content["fingerprint"]


@pytest.mark.nightly
def test_the_generators_still_make_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "scripts/datasets/make.py", str(tmp_path)], cwd=ROOT, check=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in FOLDER.glob("*.xz")
    }
