from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.joining import Part, expand_gzip, is_joining, join_parts, verify_joined

CONTENTS = (b"a" * 5_000, os.urandom(3_000_000), b"", b"end")
WHOLE = b"".join(CONTENTS)


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    """Four files in the folder, and what they are."""
    found = []
    for number, content in enumerate(CONTENTS):
        (tmp_path / f"part_a{number}").write_bytes(content)
        found.append(Part(f"part_a{number}", len(content), hashlib.sha256(content).hexdigest()))
    return found


def test_parts_become_one_file_and_are_gone(tmp_path: Path, parts: list[Part]) -> None:
    target = tmp_path / "whole"
    join_parts(tmp_path, target, parts)
    assert target.read_bytes() == WHOLE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole", "whole.parts.json"]
    assert not is_joining(target)
    seen: list[int] = []
    verify_joined(target, seen.append)
    assert sum(seen) == len(WHOLE)


@pytest.mark.parametrize("fails_at", range(6))
@pytest.mark.parametrize("where", ["append", "unlink"])
def test_an_interrupted_joining_goes_on(
    tmp_path: Path, parts: list[Part], fails_at: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spear_envs.data import joining

    target = tmp_path / "whole"
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at + 1:
            raise KeyboardInterrupt

    append, unlink = joining._append, Path.unlink
    with monkeypatch.context() as patch:
        if where == "append":
            # Half of a part has been added when it comes.
            def tear(file: object, path: Path) -> None:
                file.write(path.read_bytes()[: len(path.read_bytes()) // 2])  # type: ignore[attr-defined]
                count()
                file.seek(-(len(path.read_bytes()) // 2), os.SEEK_END)  # type: ignore[attr-defined]
                append(file, path)  # type: ignore[arg-type]

            patch.setattr(joining, "_append", tear)
        else:
            patch.setattr(Path, "unlink", lambda self, **kwargs: (count(), unlink(self, **kwargs)))
        try:
            join_parts(tmp_path, target, parts)
        except KeyboardInterrupt:
            assert is_joining(target) and not target.exists()
    if not target.exists():
        join_parts(tmp_path, target)
    assert target.read_bytes() == WHOLE
    verify_joined(target)


def test_a_missing_part_is_said(tmp_path: Path, parts: list[Part]) -> None:
    (tmp_path / "part_a1").unlink()
    with pytest.raises(SpearError, match="part_a1 is missing"):
        join_parts(tmp_path, tmp_path / "whole", parts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "damaged in what was part_a3"),
        (lambda data: data + b"x", "longer than its parts"),
        (lambda data: data[:6_000] + b"\0" + data[6_001:], "damaged in what was part_a1"),
    ],
)
def test_a_damaged_file_is_found(tmp_path: Path, parts: list[Part], change: object, words: str) -> None:
    target = tmp_path / "whole"
    join_parts(tmp_path, target, parts)
    target.write_bytes(change(WHOLE))  # type: ignore[operator]
    with pytest.raises(SpearError, match=words):
        verify_joined(target)
    (tmp_path / "whole.parts.json").write_text("[{}]")
    with pytest.raises(SpearError, match="does not say what the parts were"):
        verify_joined(target)


def test_gzip_is_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    packed, target = tmp_path / "x.gz", tmp_path / "x"
    packed.write_bytes(gzip.compress(WHOLE))
    expand_gzip(packed, target)
    assert target.read_bytes() == WHOLE
    record = tmp_path / "x.sha256"
    assert record.read_text() == f"{hashlib.sha256(WHOLE).hexdigest()}  x\n"
    target.unlink()
    record.unlink()
    packed.write_bytes(gzip.compress(WHOLE)[:-20])
    with pytest.raises(SpearError, match="cannot be unpacked"):
        expand_gzip(packed, target)
    packed.write_bytes(b"<html>")
    with pytest.raises(SpearError, match="cannot be unpacked"):
        expand_gzip(packed, target)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gz"]
