from __future__ import annotations

from pathlib import Path

import pytest

from spear_envs.data import RemoteFile, data_folder, is_offline


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
