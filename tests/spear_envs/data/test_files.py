from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data import RemoteFile, data_folder, is_offline, verify


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


class TestVerify:
    digest = hashlib.sha256(b"abc").hexdigest()

    def test_right(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"abc")
        assert verify(RemoteFile("a", size=3, sha256=self.digest), tmp_path) == self.digest
        assert verify(RemoteFile("a"), tmp_path) == self.digest
        assert verify(RemoteFile("a"), tmp_path) == self.digest  # now against the record

    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(SpearError, match="is missing: 'spear data get' fetches it"):
            verify(RemoteFile("a"), tmp_path)

    def test_wrong(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"abd")
        with pytest.raises(SpearError, match=r"it has 3 bytes instead of 4,000\): delete it and fetch it again"):
            verify(RemoteFile("a", size=4000, sha256=self.digest), tmp_path)
        with pytest.raises(SpearError, match=r"instead of ba7816bf8f01…\): delete it and fetch it again"):
            verify(RemoteFile("a", size=3, sha256=self.digest), tmp_path)

    def test_a_record_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"abc")
        for junk in (b"", b"nothing like it  a\n", b"\xff\xfe"):
            (tmp_path / "a.sha256").write_bytes(junk)
            with pytest.raises(SpearError, match="is not a checksum"):
                verify(RemoteFile("a"), tmp_path)

    def test_other_tools_read_the_record(self, tmp_path: Path) -> None:
        if shutil.which("sha256sum") is None:
            pytest.skip("no sha256sum here")
        (tmp_path / "a").write_bytes(b"abc")
        verify(RemoteFile("a"), tmp_path)
        assert subprocess.run(["sha256sum", "-c", "a.sha256"], cwd=tmp_path, check=False).returncode == 0
