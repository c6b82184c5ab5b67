"""One run from outside: its input, its output, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from signal import Signals
from typing import Protocol

from spear_sandbox.guest.job import Job, Record, Verdict, pack_job, unpack_record
from spear_sandbox.pool.cgroups import Group, Groups, OomKill, OomWatch
from spear_sandbox.pool.zygotes import LostRunError, lack_memory, send_signal
from spear_sandbox.protocol import FaultKind, Health, Isolation, KillReason, Limits, Outcome, RunStatus, SandboxFault
from spear_sandbox.service.wire import check_folders, check_name


class Backend(Protocol):
    """One way to start runs in isolation. Belongs to one event loop."""

    level: Isolation
    ending: Signals
    """What ends a run, sent to the process that ``Fork`` gives."""
    groups: Groups | None
    """Control groups for its runs; None where this process may not make any."""

    async def start(self) -> None:
        """Get ready. Raises RefusedError if this machine does not allow it."""

    def borrow(self, code: str) -> AbstractAsyncContextManager[Fork]:
        """Lend what starts the run of this program, until the run has ended."""

    def health(self) -> Health:
        """Return how it is now."""

    async def close(self) -> None:
        """End all runs and processes."""


Fork = Callable[[Sequence[int]], Awaitable[int]]
"""Starts a run with the descriptors of the job, stdout, stderr, the report, control groups and, perhaps, stdin.

Returns a pidfd; when that process has ended, nothing of the run is left.
"""

_READ_AT_ONCE = 1 << 18
_GRACE_S = 3.0
"""How much later than the supervisor inside this side ends a run."""
_ESCAPED = re.compile("[\udc80-\udcff]")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def make_job(code: str, files: Mapping[str, bytes] | None, fetch_files: Sequence[str], limits: Limits) -> Job:
    """Make what the guest's side needs to know. Raises ValueError if a file name leaves the working folder."""
    for name in (*(files or {}), *fetch_files):
        check_name(name)
    check_folders(files or {})
    return {
        "code": code,
        "files": {name: bytes(content) for name, content in (files or {}).items()},
        "fetch_files": list(fetch_files),
        "wall_s": limits.wall_s,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "descriptors": limits.descriptors,
        "file_mb": limits.file_mb,
        "disk_mb": limits.disk_mb,
        "inodes": limits.files,
        "groups": 0,
        "session": False,
    }


class Stream:
    """Output of a run: kept up to a bound, counted beyond."""

    def __init__(self, fd: int, kept: int) -> None:
        self.fd = fd
        self.kept = kept
        self.data = bytearray()
        self.count = 0
        self.open = True

    def read(self) -> bool:
        """Read what is there; False at the end of the stream."""
        try:
            part = os.read(self.fd, _READ_AT_ONCE)
        except BlockingIOError:
            return True
        if not part:
            self.open = False
            return False
        self.count += len(part)
        self.data += part[: max(0, self.kept - len(self.data))]
        return True

    def read_rest(self, most: int) -> None:
        """Read everything that is there, without waiting."""
        before = -1
        while self.open and self.count != before and self.count < most:
            before = self.count
            self.read()

    def start_again(self) -> None:
        """Discard what came so far."""
        self.read_rest(1 << 62)
        self.forget()

    def forget(self) -> None:
        """Give back the memory of what was kept."""
        self.data = bytearray()
        self.count = 0

    def text(self) -> str:
        """Decode as UTF-8; each invalid byte becomes U+FFFD, and a character cut at the bound is left out."""
        data = bytes(self.data)
        if self.count > len(data):
            # Up to three bytes of a character that has one more.
            start = next((i for i in range(1, 4) if len(data) >= i and data[-i] >= 0xC0), 0)
            if start and data[-start] >= (0xC0, 0xE0, 0xF0)[start - 1]:
                data = data[:-start]
        return _ESCAPED.sub("\ufffd", data.decode("utf-8", "surrogateescape"))


async def carry_out(
    job: Job,
    stdin: str | None,
    limits: Limits,
    level: Isolation,
    fork: Fork,
    *,
    ending: signal.Signals = signal.SIGKILL,
    queue_s: float = 0.0,
    groups: Groups | None = None,
) -> Outcome:
    """Start a run, read what it prints, and return when nothing of it is left.

    The kernel counts its memory in one of ``groups``, if any. Raises LostRunError if something outside ended it,
    SandboxFault if it could not be started, or others took its memory.
    """
    with contextlib.ExitStack() as opened:
        watch = opened.enter_context(groups.acquire(limits)) if groups is not None else OomWatch()
        job["groups"] = len(watch.entrances)

        with contextlib.ExitStack() as given:
            ends, descriptors = open_pipes(job, opened, given)
            descriptors += watch.entrances
            if stdin is not None:
                descriptors.append(make_file("stdin", stdin.encode("utf-8", "surrogatepass")))
                given.callback(os.close, descriptors[-1])
            started = time.monotonic()
            pidfd = await fork(descriptors)
            opened.callback(os.close, pidfd)
        streams = [Stream(ends[0], limits.kept_output), Stream(ends[1], limits.kept_output)]
        report = Stream(ends[2], 1 << 62)
        end = await _follow(pidfd, ending, streams, report, job["wall_s"] + _GRACE_S, limits.max_output)
        for stream in streams:
            stream.read_rest(limits.max_output + (1 << 20))
        report.read_rest(1 << 62)
        wall_s = time.monotonic() - started
        record = unpack_record(bytes(report.data))
        return _judge(record, end, streams, wall_s, queue_s, limits, job, level, watch)


def open_pipes(job: Job, kept: contextlib.ExitStack, given: contextlib.ExitStack) -> tuple[list[int], list[int]]:
    """Open the job and the pipes of stdout, stderr and the report.

    Returns the ends to read, closed with ``kept``, and the descriptors for :data:`Fork`, closed with ``given``.
    """
    ends, descriptors = [], [make_file("job", pack_job(job))]
    given.callback(os.close, descriptors[0])
    for _ in range(3):
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        kept.callback(os.close, read_end)
        given.callback(os.close, write_end)
        os.set_blocking(read_end, False)
        ends.append(read_end)
        descriptors.append(write_end)
    return ends, descriptors


def make_file(name: str, content: bytes) -> int:
    """Make an immutable anonymous file, at its start."""
    fd = os.memfd_create(f"sandbox-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


async def _follow(
    pidfd: int, ending: signal.Signals, streams: list[Stream], report: Stream, longest_s: float, most: int
) -> KillReason:
    """Read until the run's first process has ended; kill it when it prints or lasts too long, or when cancelled."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    reason = KillReason.NONE

    def end(why: KillReason) -> None:
        nonlocal reason
        if reason is KillReason.NONE:
            reason = why
            send_signal(pidfd, ending)
            lost = loop.call_later(_GRACE_S, send_signal, pidfd, signal.SIGKILL)
            ended.add_done_callback(lambda _: lost.cancel())

    def notice() -> None:
        if not ended.done():
            ended.set_result(None)

    def read(stream: Stream) -> None:
        if not stream.read():
            loop.remove_reader(stream.fd)
        if stream is not report and stream.count > most:
            end(KillReason.OUTPUT)

    # End of file is not the end: a program may close its output and continue. Nor does the end of the process imply end
    # of file, since copies of the pipe may exist.
    loop.add_reader(pidfd, notice)
    for stream in (*streams, report):
        loop.add_reader(stream.fd, read, stream)
    late = loop.call_later(longest_s, end, KillReason.TIMEOUT)
    try:
        await ended
    except asyncio.CancelledError:
        send_signal(pidfd, ending)
        raise
    finally:
        late.cancel()
        loop.remove_reader(pidfd)
        for stream in (*streams, report):
            loop.remove_reader(stream.fd)
    return reason


def _judge(
    record: Record | None,
    reason: KillReason,
    streams: list[Stream],
    wall_s: float,
    queue_s: float,
    limits: Limits,
    job: Job,
    level: Isolation,
    watch: OomWatch | Group,
) -> Outcome:
    out, error = streams
    if reason is KillReason.NONE:
        reason = _look_for_oom_kill(record, watch)
    if reason is KillReason.NONE:
        if record is None:
            raise LostRunError("the run ended without a report: something outside killed it")
        if record.verdict in (Verdict.NOT_STARTED, Verdict.STARVED):
            why = record.files.get("", b"").decode("utf-8", "replace")
            if record.verdict == Verdict.STARVED:
                raise lack_memory(why)
            raise SandboxFault(FaultKind.UNAVAILABLE, f"the run could not be started: {why}")
        if out.count > limits.max_output or error.count > limits.max_output:
            reason = KillReason.OUTPUT
        else:
            reason = {Verdict.TIMEOUT: KillReason.TIMEOUT, Verdict.MEMORY: KillReason.MEMORY}.get(
                record.verdict, KillReason.NONE
            )
    return_code: int | None = -9
    if reason is KillReason.TIMEOUT:
        return_code = None
    elif reason is KillReason.NONE and record is not None:
        return_code = os.waitstatus_to_exitcode(record.wait_status)
        if return_code == -signal.SIGKILL:
            reason = KillReason.SIGKILL
    return Outcome(
        status=RunStatus.TIME_LIMIT if reason is KillReason.TIMEOUT else RunStatus.FINISHED,
        return_code=return_code,
        stdout=out.text(),
        stderr=_append_reason(error.text(), reason, limits, job),
        wall_s=record.wall_s if record else wall_s,
        cpu_s=record.cpu_s if record else 0.0,
        peak_rss_kb=record.peak_rss_kb if record else 0,
        queue_s=queue_s,
        stdout_bytes=out.count,
        stderr_bytes=error.count,
        truncated=any(stream.count > len(stream.data) for stream in streams),
        level=level,
        reason=reason,
        files=record.files if record else {},
    )


def _look_for_oom_kill(record: Record | None, watch: OomWatch | Group) -> KillReason:
    """Return MEMORY if the kernel ended the run at its own limit. Raises SandboxFault if it did for others' memory.

    A group reports on each process of the run. Without one, only a run whose first process or supervisor was ended by
    SIGKILL is considered, and any kill in the meantime counts as its own.
    """
    killed = record is None or (
        record.verdict == Verdict.ITSELF
        and os.WIFSIGNALED(record.wait_status)
        and os.WTERMSIG(record.wait_status) == signal.SIGKILL
    )
    if not killed and not watch.distinguishes_runs:
        return KillReason.NONE
    kill = watch.judge()
    if kill is OomKill.OTHERS and killed:
        text = "the kernel killed the run for the memory that others took: lower --max-running or --memory-mb"
        raise SandboxFault(FaultKind.MEMORY, text)
    return KillReason.MEMORY if kill is OomKill.OWN else KillReason.NONE


def _append_reason(text: str, reason: KillReason, limits: Limits, job: Job) -> str:
    if reason is KillReason.MEMORY:
        line = f"[sandbox] killed: memory limit of {job['memory_mb']} MB for all processes together\n"
    elif reason is KillReason.OUTPUT:
        size, rest = divmod(limits.max_output, 1 << 20)
        line = f"[sandbox] killed: output limit of {f'{limits.max_output} bytes' if rest else f'{size} MiB'}\n"
    else:
        return text
    return text + ("" if not text or text.endswith("\n") else "\n") + line
