"""What the supervisor of a run reads, fetches and reports, and the filter of system calls."""

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_sandbox.guest import seccomp
from spear_sandbox.guest.job import Job, Record, Verdict, pack_job, pack_record, read_job, unpack_record
from spear_sandbox.guest.supervisor import _sum_memory, fetch_files, report_failure
from spear_sandbox.guest.syscalls import ALLOWED, EXAMINED, NEWEST

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
    assert dict(fetch_files(str(folder / "missing"), ["*", "plain"])) == {}


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


ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
X86, ARM = 0xC000003E, 0xC00000B7


def decide(program: bytes, number: int, *arguments: int, architecture: int = X86) -> int:
    """What the kernel would do: an interpreter of the few instructions that there are."""
    steps = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *[0] * (6 - len(arguments))))
    value, place = 0, 0
    for _ in range(len(steps)):
        code, yes, no, operand = steps[place]
        place += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += yes if holds else no
    raise AssertionError("no decision")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(seccomp, "MACHINE", request.param)
    return str(request.param)


def test_every_number_gets_its_decision(machine: str) -> None:
    column, architecture = (0, X86) if machine == "x86_64" else (1, ARM)
    program = seccomp.build_filter()
    allowed = {numbers[column] for numbers in ALLOWED.values()} - {None}
    examined = {numbers[column] for numbers in EXAMINED.values()} - {None}
    for number in set(range(NEWEST + 1)) - examined:
        expected = ALLOW if number in allowed else REFUSE | errno.EPERM
        assert decide(program, number, architecture=architecture) == expected, number
    for number in (NEWEST + 1, 1000, 0x40000001, 0xFFFFFFFF):
        assert decide(program, number, architecture=architecture) == REFUSE | errno.ENOSYS
    other = ARM if machine == "x86_64" else X86
    assert decide(program, 0, architecture=other) == KILL
    assert decide(program, 0, architecture=0x40000003) == KILL, "32-bit programs"


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("clone", (0x11,), True), ("clone", (0x01200011,), True), ("clone", (0x10000011,), False),
        ("clone", (0x00020011,), False), ("clone", (0x02000011,), False), ("clone", (0x00010F00,), True),
        ("clone", (0x00000411,), False), ("mmap", (0, 4096, 3, 0x22), True), ("mmap", (0, 4096, 3, 0x21), False),
        ("mmap", (0, 4096, 3, 0x23), False), ("mmap", (0, 4096, 1, 0x01), True), ("socket", (1, 1), False),
        ("socketpair", (1, 2), True), ("socketpair", (2, 1), False), ("ioctl", (0, 0x541B), True),
        ("ioctl", (0, 0x5412), False), ("prlimit64", (0, 7), True), ("prlimit64", (2, 7), True),
        ("prlimit64", (1, 7), False), ("setpriority", (0, 0, 5), True), ("setpriority", (0, 1, 5), False),
        ("setpriority", (2, 0, 5), False), ("sched_setaffinity", (1,), False), ("kill", (1, 9), True),
        ("fcntl", (0, 0), True), ("fcntl", (0, 8), True), ("fcntl", (0, 16), True), ("fcntl", (0, 1030), True),
        ("fcntl", (0, 37), False), ("fcntl", (0, 1026), False), ("fcntl", (0, 1031), False),
        ("mknodat", (3, 0, 0x11B6), True), ("mknodat", (3, 0, 0x01B6), True), ("mknodat", (3, 0, 0x21B6), False),
        ("sendto", (3, 0, 1, 0x4000), True), ("sendto", (3, 0, 1, 0x4001), False), ("recvmsg", (3, 0, 1), False),
        ("seccomp", (1, 0), False),
    ],
)  # fmt: skip
def test_decisions_by_arguments(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[int, ...], allowed: bool
) -> None:
    monkeypatch.setattr(seccomp, "MACHINE", "x86_64")
    number = (EXAMINED.get(name) or ALLOWED[name])[0]
    assert number is not None
    assert (decide(seccomp.build_filter(), number, *arguments) == ALLOW) is allowed


def test_the_supervisor_is_asked_about_locks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "MACHINE", "x86_64")
    fcntl, flock = (EXAMINED[name][0] or 0 for name in ("fcntl", "flock"))
    found = {}
    for locks in seccomp.Locks:
        program = seccomp.build_filter(locks=locks)
        asked = [
            command
            for command in range(2048)
            if decide(program, fcntl, 0, command) not in (ALLOW, REFUSE | errno.EPERM)
        ]
        found[locks.value] = (asked, decide(program, fcntl, 0, 6) == ALLOW, decide(program, flock) == ALLOW)
    assert found == {"ask": ([5, 6, 7], False, False), "records": ([], True, False), "allow": ([], True, True)}


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("kill", (77, 9), False), ("tgkill", (77, 77, 6), True), ("tgkill", (78, 78, 6), False),
        ("prlimit64", (77, 7), True), ("prlimit64", (78, 7), False), ("fcntl", (0, 8), False),
        ("fcntl", (0, 3), True), ("socketpair", (1, 1), True), ("socketpair", (1, 0x80001), True),
        ("socketpair", (1, 2), False), ("setpriority", (0, 0, 5), False), ("pidfd_send_signal", (3, 9), False),
    ],
)  # fmt: skip
def test_decisions_without_a_pid_namespace(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[int, ...], allowed: bool
) -> None:
    monkeypatch.setattr(seccomp, "MACHINE", "x86_64")
    number = (EXAMINED.get(name) or ALLOWED[name])[0]
    assert number is not None
    assert (decide(seccomp.build_filter(own_process=77), number, *arguments) == ALLOW) is allowed


def test_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "MACHINE", "riscv64")
    with pytest.raises(OSError, match="only for x86_64 and aarch64"):
        seccomp.build_filter()


@pytest.mark.parametrize(
    ("column", "headers"),
    [
        (0, ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"]),
        (1, ["/usr/include/asm-generic/unistd.h"]),
    ],
)
def test_numbers_are_those_of_the_kernels_headers(column: int, headers: list[str]) -> None:
    found = next((Path(path) for path in headers if Path(path).exists()), None)
    if found is None:
        pytest.skip("the kernel's headers are not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", found.read_text()))
    listed = {name: numbers[column] for name, numbers in {**ALLOWED, **EXAMINED}.items()}
    # Names that the generic header gives in two forms.
    aliases = {"newfstatat": "fstatat"}
    compared = 0
    for name, number in listed.items():
        in_header = known.get(name) or known.get(aliases.get(name, name))
        if number is not None and in_header is not None:
            assert int(in_header) == number, name
            compared += 1
    assert compared > 150
