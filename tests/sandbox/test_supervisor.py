"""What the supervisor of a run reads, fetches and reports."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_sandbox.guest.job import Job, Record, Verdict, pack_job, pack_record, read_job, unpack_record
from spear_sandbox.guest.supervisor import _sum_memory, fetch_files, report_failure

names = st.text(st.characters(exclude_categories=()), min_size=1, max_size=20)
records = st.builds(
    Record,
    st.integers(0, 4),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.integers(0, 2**40),
    st.dictionaries(names, st.binary(max_size=100), max_size=4),
)


@given(records)
def test_records_survive(record: Record) -> None:
    assert unpack_record(pack_record(record)) == record


@given(records, st.data())
def test_cut_records_are_none(record: Record, data: st.DataObject) -> None:
    packed = pack_record(record)
    assert unpack_record(packed[: data.draw(st.integers(0, len(packed) - 1))]) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    assert unpack_record(data) is None or len(data) >= 33


@given(st.text(st.characters(exclude_categories=())), st.dictionaries(names, st.binary(max_size=50), max_size=3))
def test_jobs_survive(code: str, files: dict[str, bytes]) -> None:
    job: Job = {
        "code": code,
        "files": files,
        "fetch_files": list(files),
        "wall_s": 1.5,
        "memory_mb": 1,
        "processes": 2,
        "descriptors": 3,
        "file_mb": 4,
        "disk_mb": 5,
        "inodes": 6,
    }
    fd = os.memfd_create("job")
    os.write(fd, pack_job(job))
    assert read_job(fd) == job


def test_fetched_files_are_regular_and_below_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "plain").write_bytes(b"\0\xff")
    (folder / "deep" / "file").write_text("x")
    (folder / "big").write_bytes(bytes((16 << 20) + 1))
    (folder / "most").write_bytes(bytes(16 << 20))
    (folder / "link").symlink_to("../secret")
    (folder / "way").symlink_to("..")
    os.mkfifo(folder / "pipe")
    wanted = ["plain", "deep/file", "big", "most", "link", "way/secret", "pipe", "deep", "missing", "plain/x"]
    found = dict(fetch_files(str(folder), wanted))
    assert found == {"plain": b"\0\xff", "deep/file": b"x", "most": bytes(16 << 20)}
    for number in range(9):
        with open(folder / f"hole{number}", "wb") as file:
            file.truncate(10 << 20)
    assert len(dict(fetch_files(str(folder), ["hole*"]))) == 6, "64 MiB in all"


def test_memory_is_counted_once_when_it_is_counted_exactly() -> None:
    code = """
import os, sys, time
held = b"x" * (64 << 20)
for _ in range(3):
    if os.fork() == 0:
        break
os.write(1, b"%d\\n" % os.getpid())
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    pids = [process.stdout.readline().strip() for _ in range(4)]
    try:
        roughly = _sum_memory(iter(pids), exactly=False) >> 20
        exactly = _sum_memory(iter(pids), exactly=True) >> 20
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()
    assert roughly >= 4 * 64
    assert 64 <= exactly < 2 * 64
    assert _sum_memory(iter(["999999999"]), exactly=True) == 0


@pytest.mark.parametrize("exactly", [False, True])
def test_a_process_cannot_lie_about_its_memory_by_its_name(exactly: bool) -> None:
    code = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"RssAnon: 0 kB", 0, 0, 0)
held = b"x" * (64 << 20)
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    try:
        assert _sum_memory(iter([str(process.pid)]), exactly=exactly) >= 64 << 20
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (OSError(errno.ENOMEM, "mount"), Verdict.STARVED),
        (MemoryError(), Verdict.STARVED),
        (OSError(errno.EPERM, "mount"), Verdict.NOT_STARTED),
        (ValueError("job"), Verdict.NOT_STARTED),
    ],
)
def test_a_run_without_memory_to_start_says_so(error: Exception, verdict: int) -> None:
    read_end, write_end = os.pipe()
    report_failure(error, write_end)
    record = unpack_record(os.read(read_end, 1 << 16))
    for fd in (read_end, write_end):
        os.close(fd)
    assert record is not None and record.verdict == verdict
    assert record.files[""].decode() == f"{type(error).__name__}: {error}"
