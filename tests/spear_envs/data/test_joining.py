from __future__ import annotations

import gzip
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.archives import join_files

CONTENTS = (b"a" * 5_000, os.urandom(3_000_000), b"", b"end")
WHOLE = b"".join(CONTENTS)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part_a{number}" for number in range(len(CONTENTS))]
    for path, content in zip(paths, CONTENTS, strict=True):
        path.write_bytes(content)
    return paths


def test_parts_become_one_file(tmp_path: Path, parts: list[Path]) -> None:
    assert join_files(parts, tmp_path / "whole") == hashlib.sha256(WHOLE).hexdigest()
    assert (tmp_path / "whole").read_bytes() == WHOLE
    assert len(list(tmp_path.iterdir())) == len(parts) + 1


def test_gzip_is_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    packed, target = tmp_path / "x.gz", tmp_path / "x"
    packed.write_bytes(gzip.compress(WHOLE))
    assert join_files([packed], target) == hashlib.sha256(WHOLE).hexdigest()
    assert target.read_bytes() == WHOLE
    target.unlink()
    for damaged in (gzip.compress(WHOLE)[:-20], b"<html>"):
        packed.write_bytes(damaged)
        with pytest.raises(SpearError, match="cannot be unpacked"):
            join_files([packed], target)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gz"]


def test_a_disk_without_room_is_found_first(tmp_path: Path, parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=len(WHOLE) - 1))
    with pytest.raises(SpearError, match="whole needs 3"):
        join_files(parts, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
