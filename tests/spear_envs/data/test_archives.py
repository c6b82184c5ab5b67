"""Archives of others, hostile and damaged ones among them, and files in parts."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.data import unpack_archive
from spear_envs.data.archives import join_files

FILES = {"train/a-1/game.json": b"{}" * 5000, "train/b/game.json": b"", "top.txt": "ü".encode()}


def make_zip(path: Path, files: dict[str, bytes], **more: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **more) as archive:
        archive.writestr("train/", b"")
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, files: dict[str, bytes], *members: tarfile.TarInfo, mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o4777
            archive.addfile(entry, io.BytesIO(content))
        for member in members:
            archive.addfile(member)
    return path


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuse(archive: Path, folder: Path, match: str, **limits: int) -> None:
    with pytest.raises(SpearError, match=match):
        unpack_archive(archive, folder, **limits)
    assert not folder.exists() or read_folder(folder) == {}


class TestGood:
    def test_zip(self, tmp_path: Path) -> None:
        archive = make_zip(tmp_path / "a.zip", FILES)
        for _ in range(2):  # again over what is there
            assert unpack_archive(archive, tmp_path / "out") == 3
            assert read_folder(tmp_path / "out") == FILES

    @pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
    def test_tar(self, tmp_path: Path, mode: str) -> None:
        assert unpack_archive(make_tar(tmp_path / "a", FILES, mode=mode), tmp_path / "out") == 3
        assert read_folder(tmp_path / "out") == FILES
        assert not (tmp_path / "out" / "top.txt").stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)

    def test_a_tar_that_ends_with_a_zip(self, tmp_path: Path) -> None:
        inner = make_zip(tmp_path / "inner.zip", FILES).read_bytes()
        unpack_archive(make_tar(tmp_path / "a.tar", {"readme": b"x", "inner.zip": inner}, mode="w"), tmp_path / "out")
        assert read_folder(tmp_path / "out") == {"readme": b"x", "inner.zip": inner}

    def test_archives_share_a_folder(self, tmp_path: Path) -> None:
        unpack_archive(make_zip(tmp_path / "a.zip", {"x/1": b"1", "x/2": b"2"}), tmp_path / "out")
        unpack_archive(make_zip(tmp_path / "b.zip", {"x/2": b"new", "x/3": b"3"}), tmp_path / "out")
        assert read_folder(tmp_path / "out") == {"x/1": b"1", "x/2": b"new", "x/3": b"3"}


OUTSIDE = ["../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil", "C:/evil"]


class TestHostile:
    @pytest.mark.parametrize("name", OUTSIDE)
    def test_names_that_lead_outside(self, tmp_path: Path, name: str) -> None:
        archive = tmp_path / "a.zip"
        with zipfile.ZipFile(archive, "w") as zipped:
            zipped.writestr("good", b"good")
            zipped.writestr(zipfile.ZipInfo(name), b"evil")
        refuse(archive, tmp_path / "in" / "out", "outside its folder")
        refuse(make_tar(tmp_path / "a.tar", {"good": b"good", name: b"evil"}), tmp_path / "in" / "out", "outside")
        assert not list(tmp_path.rglob("evil"))

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "C:"]), min_size=1, max_size=6).map("/".join))
    def test_no_name_escapes(self, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
        base = tmp_path_factory.mktemp("names")
        archive = make_tar(base / "a.tar", {name: b"x"})
        before = read_folder(base)
        with contextlib.suppress(SpearError, OSError):
            unpack_archive(archive, base / "deep" / "out")
        new = read_folder(base).keys() - before.keys()
        assert all(found.startswith("deep/out/") for found in new)

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
    )
    def test_tar_members_that_are_no_files(self, tmp_path: Path, kind: bytes) -> None:
        entry = tarfile.TarInfo("x")
        entry.type = kind
        entry.linkname = "/etc/passwd"
        refuse(make_tar(tmp_path / "a.tar", {"good": b"good"}, entry), tmp_path / "out", "a link or a device")

    @pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
    def test_zip_members_that_are_no_files(self, tmp_path: Path, kind: int) -> None:
        entry = zipfile.ZipInfo("x")
        entry.create_system = 3
        entry.external_attr = (kind | 0o777) << 16
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
            zipped.writestr("good", b"good")
            zipped.writestr(entry, "/etc/passwd")
        refuse(tmp_path / "a.zip", tmp_path / "out", "a link or a device")

    def test_a_link_that_was_there_before(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "train").symlink_to(tmp_path / "outside")
        with pytest.raises(SpearError, match="leads out of"):
            unpack_archive(make_zip(tmp_path / "a.zip", {"train/a": b"evil"}), tmp_path / "out")
        assert not list((tmp_path / "outside").iterdir())
        (tmp_path / "out" / "train").unlink()
        (tmp_path / "out" / "a").symlink_to(tmp_path / "outside" / "a")  # a file in its place is replaced, not followed
        unpack_archive(make_zip(tmp_path / "a.zip", {"a": b"good"}), tmp_path / "out")
        assert not list((tmp_path / "outside").iterdir()) and (tmp_path / "out" / "a").read_bytes() == b"good"

    def test_limits(self, tmp_path: Path) -> None:
        bomb = make_zip(tmp_path / "a.zip", {"zeros": bytes(10**7)})
        assert bomb.stat().st_size < 50_000
        refuse(bomb, tmp_path / "out", "would unpack to 10.0 MB, more than the 1.0 MB", max_bytes=10**6)
        refuse(make_zip(tmp_path / "b.zip", FILES), tmp_path / "out", "more than 2 files", max_files=2)

    @pytest.mark.parametrize("claim", [10, 2 * 10**6])
    def test_a_size_that_is_a_lie(self, tmp_path: Path, claim: int) -> None:
        archive = make_zip(tmp_path / "a.zip", {"zeros": bytes(10**6)})
        content = bytearray(archive.read_bytes())
        for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):  # both places that state it
            place = content.rfind(signature) + offset
            assert int.from_bytes(content[place : place + 4], "little") == 10**6
            content[place : place + 4] = claim.to_bytes(4, "little")
        archive.write_bytes(content)
        refuse(archive, tmp_path / "out", "cannot be unpacked|holds (more|less)")

    def test_a_size_that_cannot_be(self, tmp_path: Path) -> None:
        entry = tarfile.TarInfo("x")
        entry.size = 10**16
        (tmp_path / "a.tar").write_bytes(entry.tobuf(tarfile.GNU_FORMAT))
        refuse(tmp_path / "a.tar", tmp_path / "out", "cannot be unpacked", max_bytes=10**17)

    def test_a_disk_that_is_too_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        archive = make_zip(tmp_path / "a.zip", {"x": bytes(10**6)})
        usage = shutil.disk_usage(tmp_path)._replace(free=10**6 - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        refuse(archive, tmp_path / "out", r"what is in a.zip needs 1.0 MB, and .*out has 1.0 MB left: free the disk")


NAMES_THAT_CANNOT_BE = [["."], ["a", "a/b"], ["a/b", "a"], ["a" * 300], ["/".join(["d"] * 3000)]]


class TestDamaged:
    @pytest.mark.parametrize("names", NAMES_THAT_CANNOT_BE, ids=lambda names: "+".join(names)[:12])
    def test_names_that_cannot_be(self, tmp_path: Path, names: list[str]) -> None:
        archive = make_tar(tmp_path / "a.tar", dict.fromkeys(names, b"x"))
        with pytest.raises(SpearError, match=r"a\.tar"):
            unpack_archive(archive, tmp_path / "out")

    def test_a_name_that_is_not_utf_8(self, tmp_path: Path) -> None:
        archive = make_zip(tmp_path / "a.zip", {"é": b"x"})
        archive.write_bytes(archive.read_bytes().replace("é".encode(), b"\xff\xfe"))
        refuse(archive, tmp_path / "out", "cannot be unpacked")

    def test_a_size_of_hundreds_of_digits(self, tmp_path: Path) -> None:
        entry = tarfile.TarInfo("x")
        entry.pax_headers = {"size": "9" * 400}
        refuse(make_tar(tmp_path / "a.tar", {}, entry, mode="w"), tmp_path / "out", "cannot be unpacked")

    def test_a_file_is_where_the_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("mine")
        with pytest.raises(SpearError, match="File exists"):
            unpack_archive(make_zip(tmp_path / "a.zip", FILES), tmp_path / "out")
        assert (tmp_path / "out").read_text() == "mine"

    @pytest.mark.parametrize("mode", ["zip", "w:gz", "w:bz2", "w:xz", "w"])
    def test_cut_off_or_flipped(self, tmp_path: Path, mode: str) -> None:
        noise = {"noise": os.urandom(100_000)}
        archive = tmp_path / "a"
        make_zip(archive, noise) if mode == "zip" else make_tar(archive, noise, mode=mode)
        content = archive.read_bytes()
        archive.write_bytes(content[: len(content) // 2])
        refuse(archive, tmp_path / "out", "cannot be unpacked .*: delete it and fetch it again")
        if mode != "w":  # plain tar has no checksum of its contents
            archive.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
            refuse(archive, tmp_path / "out", "cannot be unpacked .*: delete it and fetch it again")

    def test_no_archive(self, tmp_path: Path) -> None:
        (tmp_path / "a.zip").write_text("<html>Sign in</html>")
        refuse(tmp_path / "a.zip", tmp_path / "out", "cannot be unpacked")

    def test_encrypted(self, tmp_path: Path) -> None:
        archive = make_zip(tmp_path / "a.zip", {"x": b"secret"})
        content = bytearray(archive.read_bytes())
        for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            content[content.rfind(signature) + offset] |= 1
        archive.write_bytes(content)
        refuse(archive, tmp_path / "out", "encrypted")


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
