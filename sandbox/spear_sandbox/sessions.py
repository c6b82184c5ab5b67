"""A session from outside: a run that lasts from cell to cell and is stopped in between."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial

from spear_sandbox.guest.interpreter import HEAD, MAX_PARTS, MAX_REPLY
from spear_sandbox.guest.job import Job, Verdict, unpack_record
from spear_sandbox.guest.supervisor import GO_ON, INTERRUPT, REST
from spear_sandbox.pool.admission import Admission, QueueFullError
from spear_sandbox.pool.backends import SESSION_MODULES
from spear_sandbox.pool.cgroups import OomKill
from spear_sandbox.pool.runs import Backend, Stream, make_job, open_pipes
from spear_sandbox.pool.zygotes import send_signal, wait_readable
from spear_sandbox.protocol import (
    CellError,
    CellOutcome,
    CellStatus,
    FaultKind,
    KillReason,
    Limits,
    SandboxFault,
    Session,
)
from spear_sandbox.service.wire import check_name
from spear_sandbox.web.listening import LARGE, work_aside

LONGEST_S = 86_400.0
"""The longest life of a session."""
MAX_FILE_BYTES = 8 << 20
_GRACE_S = 3.0
"""How long an interrupted cell may take to end before its session is ended."""
_FILE_S = 20.0
_MOST_WAITING = 64
"""Cells and files of one session that may wait for their turn; each holds its request in memory."""


@dataclass(frozen=True)
class _Answer:
    """What arrived for a question: the table of sizes, and then all names and contents."""

    parts: int
    body: memoryview

    def unpack(self) -> list[tuple[str, memoryview]]:
        """Return the names and contents. Raises ValueError if the sizes are not those of the body."""
        place = 8 * self.parts
        sizes = struct.unpack_from(f"<{2 * self.parts}I", self.body)
        if place + sum(sizes) != len(self.body):
            raise ValueError("the sizes of an answer are wrong")
        pieces = []
        for size in sizes:
            pieces.append(self.body[place : place + size])
            place += size
        names = (bytes(name).decode("utf-8", "replace") for name in pieces[::2])
        return list(zip(names, pieces[1::2], strict=True))


class LocalSession(Session):
    """See :class:`spear_sandbox.protocol.Session`. Belongs to one event loop; made by :meth:`open`.

    A cell takes a place of ``admission``, an idle session none. ``limits.wall_s`` is that of one cell.
    """

    def __init__(self, admission: Admission, limits: Limits) -> None:
        self.id = secrets.token_hex(16)
        self.used = time.monotonic()
        """When the last cell ended."""
        self.running = False
        self.on_end: Callable[[], None] = _do_nothing
        """Called once, when it has ended."""
        self._limits = limits
        self._admission = admission
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._number = 0
        self._owed: deque[int] = deque()
        """Numbers of the questions without an answer; those of abandoned cells are answered late."""
        self._received = bytearray()
        self._skip = 0
        """Bytes of an unwanted answer that are still to come."""
        self._answer: asyncio.Future[_Answer] | None = None
        self._sending: asyncio.Future[None] | None = None
        """Sends the last question, also where nobody waits for its answer any more: half of one would garble others."""
        self._ended = asyncio.Event()
        self._reason = KillReason.NONE
        self._life: asyncio.Task[None] | None = None
        self._hung_up: asyncio.TimerHandle | None = None
        self._pidfd: int | None = None

    @classmethod
    async def open(
        cls, backend: Backend, admission: Admission, limits: Limits, files: Mapping[str, bytes] | None = None
    ) -> LocalSession:
        """Start a session. Raises SandboxFault if it cannot be, ValueError if a file name leaves the working folder."""
        session = cls(admission, limits)
        job = make_job("", files, (), replace(limits, wall_s=LONGEST_S))
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session._life = asyncio.ensure_future(session._live(backend, job, started))
        try:
            await asyncio.wait((started, session._life), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await session.close()
            raise
        if not started.done():
            error = session._life.exception()
            if isinstance(error, (SandboxFault, ValueError)):
                raise error
            raise SandboxFault(FaultKind.UNAVAILABLE, f"the session could not be started: {error}") from error
        session._order(REST)
        return session

    @property
    def busy(self) -> bool:
        """Whether a cell or a file is under way, or waits for its turn or a place."""
        return self._waiting > 0

    @property
    def alive(self) -> bool:
        """Whether cells can be run."""
        return not self._ended.is_set()

    async def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        place: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> CellOutcome:
        """See :meth:`spear_sandbox.protocol.Session.run`. ``place`` holds a place for a cell instead of ``admission``.

        The place is taken when it is the cell's turn, so cells that wait for others of their session hold none.
        """
        seconds = min(timeout_s or self._limits.wall_s, self._limits.wall_s)
        async with self._take_turn(), (place or self._take_place)():
            self.running = True
            try:
                return await self._run(code, seconds)
            except asyncio.CancelledError:
                self._order(INTERRUPT)
                raise
            finally:
                self._order(REST)
                self.running = False
                self.used = time.monotonic()
                for stream in self._streams:
                    stream.forget()

    @contextlib.asynccontextmanager
    async def _take_turn(self) -> AsyncIterator[None]:
        self._check()
        if self._waiting >= _MOST_WAITING:
            raise QueueFullError(f"{_MOST_WAITING} others of this session wait already", 1.0)
        self._waiting += 1
        try:
            async with self._turn:
                self._check()
                yield
        finally:
            self._waiting -= 1

    @contextlib.asynccontextmanager
    async def _take_place(self) -> AsyncIterator[None]:
        await self._admission.enter(None)
        try:
            yield
        finally:
            self._admission.leave()

    async def write_file(self, name: str, content: bytes) -> None:
        check_name(name)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"the file {name[:80]!r} has more than {MAX_FILE_BYTES >> 20} MiB: send smaller ones.")
        encoded = await work_aside(len(content), lambda: base64.b64encode(content).decode())
        await self._do("write", name=name, content=encoded)

    async def read_file(self, name: str) -> bytes:
        check_name(name)
        for part, content in await self._do("read", name=name):
            if part == "content":
                return bytes(content)
        raise SandboxFault(FaultKind.BAD_REPLY, "the session's answer is not a file")

    async def list_files(self) -> dict[str, int]:
        """See :meth:`spear_sandbox.protocol.Session.list_files`; names that cannot be asked for are left out."""
        files = {}
        for part, content in await self._do("list"):
            size, _, name = bytes(content).decode("utf-8", "replace").partition(" ")
            with contextlib.suppress(ValueError):
                check_name(name)
                if part == "file" and "\ufffd" not in name:
                    files[name] = int(size)
        return files

    async def interrupt(self) -> None:
        self._check()
        if self.running:
            self._order(INTERRUPT)

    async def close(self) -> None:
        self._kill(KillReason.NONE)
        if self._life is not None:
            await asyncio.wait((self._life,))

    async def _do(self, action: str, **arguments: str) -> list[tuple[str, memoryview]]:
        """Have the session's process do something with files."""
        async with self._take_turn():
            self._order(GO_ON)
            try:
                answer = await self._unpack(await self._ask(action, _FILE_S, **arguments))
            except asyncio.TimeoutError:
                self._kill(KillReason.TIMEOUT)
                raise SandboxFault(FaultKind.SESSION_ENDED, "the session did not answer and was ended") from None
            finally:
                self._order(REST)
                self.used = time.monotonic()
        for part, content in answer:
            if part == "failure":
                raise ValueError(f"the session refused the file: {bytes(content[:200]).decode('utf-8', 'replace')}")
        return answer

    async def _run(self, code: str, seconds: float) -> CellOutcome:
        for stream in self._streams:
            stream.start_again()
        self._order(GO_ON)
        started = time.monotonic()
        status = CellStatus.FINISHED
        answer: list[tuple[str, memoryview]] = []
        try:
            task = asyncio.ensure_future(self._ask("run", None, code=code))
            try:
                received = await asyncio.wait_for(asyncio.shield(task), seconds)
            except asyncio.TimeoutError:
                status = CellStatus.TIME_LIMIT
                self._order(INTERRUPT)
                try:
                    received = await asyncio.wait_for(task, _GRACE_S)
                except asyncio.TimeoutError:
                    self._kill(KillReason.TIMEOUT)
                    await self._ended.wait()
                    raise self._lost() from None
            finally:
                task.cancel()
            self._order(REST)
            answer = await self._unpack(received)
        except SandboxFault:
            await self._ended.wait()
        if not self.alive:
            status = CellStatus.ENDED
        for stream in self._streams:
            stream.read_rest(self._limits.max_output)
        out, error = self._streams
        display, failure = await work_aside(sum(len(content) for _, content in answer), partial(_read_cell, answer))
        outcome = CellOutcome(
            status=status,
            stdout=out.text(),
            stderr=error.text(),
            display=display,
            error=failure,
            wall_s=time.monotonic() - started,
            truncated=any(stream.count > len(stream.data) for stream in self._streams),
            reason=self._reason if status is CellStatus.ENDED else KillReason.NONE,
        )
        return outcome

    async def _unpack(self, answer: _Answer) -> list[tuple[str, memoryview]]:
        try:
            return await work_aside(len(answer.body), answer.unpack)
        except (ValueError, struct.error):  # the program itself wrote to the socket
            self._kill(KillReason.OUTPUT)
            raise self._lost() from None

    async def _ask(self, action: str, seconds: float | None, **arguments: str) -> _Answer:
        """Send a request and wait for its answer. Raises SandboxFault if the session ends, TimeoutError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer] = loop.create_future()

        async def ask() -> _Answer:
            self._number += 1
            self._owed.append(self._number)
            self._answer = answer
            asked = {"action": action, "arguments": arguments, "number": self._number}
            size = sum(map(len, arguments.values()))
            self._sending = asyncio.ensure_future(self._send(asked, size, self._sending))
            await asyncio.wait((self._sending,))
            ended = asyncio.ensure_future(self._ended.wait())
            try:
                await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                self._answer = None
                self._take()
            if not answer.done():
                raise self._lost()
            return answer.result()

        return await asyncio.wait_for(ask(), seconds)

    async def _send(self, asked: dict[str, object], size: int, former: asyncio.Future[None] | None) -> None:
        body = await work_aside(size, lambda: json.dumps(asked).encode("ascii"))
        if former is not None:
            await asyncio.wait((former,))
        with contextlib.suppress(OSError):  # it has hung up
            await asyncio.get_running_loop().sock_sendall(self._line, len(body).to_bytes(4, "big") + body)

    async def _live(self, backend: Backend, job: Job, started: asyncio.Future[None]) -> None:
        """Hold everything that belongs to the session until its run has ended."""
        try:
            async with backend.borrow(SESSION_MODULES) as fork:
                with contextlib.ExitStack() as opened:
                    watch = None
                    if backend.groups is not None:
                        watch = opened.enter_context(backend.groups.acquire(self._limits))
                        job["groups"] = len(watch.entrances)
                    job["session"] = True
                    self._line, theirs = socket.socketpair()
                    self._line.setblocking(False)
                    opened.callback(self._line.close)
                    with contextlib.ExitStack() as given:
                        given.callback(theirs.close)
                        ends, descriptors = open_pipes(job, opened, given)
                        descriptors += watch.entrances if watch is not None else ()
                        orders, self._orders = os.pipe2(os.O_CLOEXEC)
                        given.callback(os.close, orders)
                        opened.callback(os.close, self._orders)
                        descriptors += [orders, theirs.fileno()]
                        pidfd = self._pidfd = await fork(descriptors)
                        opened.callback(os.close, pidfd)
                    kept = self._limits.kept_output
                    self._streams = [Stream(ends[0], kept), Stream(ends[1], kept)]
                    report = Stream(ends[2], 1 << 20)
                    started.set_result(None)
                    try:
                        await self._follow(pidfd)
                    finally:
                        send_signal(pidfd, signal.SIGKILL)
                        for stream in self._streams:
                            stream.read_rest(self._limits.max_output)
                            stream.open = False  # its descriptor is closed next, and may then be another run's
                        report.read_rest(1 << 20)
                        record = unpack_record(bytes(report.data))
                        if self._reason is KillReason.NONE and (
                            (record is not None and record.verdict == Verdict.MEMORY)
                            or (watch is not None and watch.judge() is OomKill.OWN)
                        ):
                            self._reason = KillReason.MEMORY
                        elif (
                            self._reason is KillReason.NONE and record is not None and record.verdict == Verdict.TIMEOUT
                        ):
                            self._reason = KillReason.TIMEOUT
                        self._ended.set()
        finally:
            self._ended.set()
            self._received = bytearray()
            self._answer = None
            for task in (self._sending, self._hung_up):
                if task is not None:
                    task.cancel()
            on_end, self.on_end = self.on_end, _do_nothing
            on_end()

    async def _follow(self, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._line.fileno(), self._receive)
        for stream in self._streams:
            loop.add_reader(stream.fd, self._read, stream)
        try:
            await wait_readable(pidfd)
        finally:
            for fd in (self._line.fileno(), *(stream.fd for stream in self._streams)):
                loop.remove_reader(fd)

    def _read(self, stream: Stream) -> None:
        if not stream.read():
            asyncio.get_running_loop().remove_reader(stream.fd)
        if stream.count > self._limits.max_output:
            self._kill(KillReason.OUTPUT)

    def _receive(self) -> None:
        try:
            part = self._line.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._line.fileno())
            # Its supervisor is about to report why it ended, unless the program has only closed the socket.
            self._hung_up = loop.call_later(_GRACE_S, self._kill, KillReason.NONE)
            return
        skipped = min(self._skip, len(part))
        self._skip -= skipped
        self._received += part[skipped:]
        self._take()

    def _take(self) -> None:
        """Take what has arrived: one answer for each question, in order. Anything else ends the session.

        The program shares the process with what answers, so it can write anything. Sizes are checked before their bytes
        are kept, and an answer for which nobody waits any more is not kept at all.
        """
        while self._received:
            if len(self._received) < HEAD.size and self._owed:
                return
            number, parts, size = HEAD.unpack_from(self._received) if self._owed else (0, 0, 0)
            if not self._owed or number != self._owed[0] or parts > MAX_PARTS or not 8 * parts <= size <= MAX_REPLY:
                asyncio.get_running_loop().remove_reader(self._line.fileno())
                self._received = bytearray()
                self._kill(KillReason.OUTPUT)
                return
            is_wanted = number == self._number and self._answer is not None and not self._answer.done()
            if len(self._received) < HEAD.size + size and is_wanted:
                return
            self._owed.popleft()
            received, self._received = self._received, self._received[HEAD.size + size :]
            if is_wanted and self._answer is not None:
                self._answer.set_result(_Answer(parts, memoryview(received)[HEAD.size : HEAD.size + size]))
            else:
                self._skip = max(0, HEAD.size + size - len(received))

    def _order(self, order: bytes) -> None:
        if self.alive:
            with contextlib.suppress(OSError):
                os.write(self._orders, order)

    def _kill(self, reason: KillReason) -> None:
        if self.alive:
            if self._reason is KillReason.NONE:
                self._reason = reason
            if self._pidfd is not None:
                send_signal(self._pidfd, signal.SIGKILL)
            elif self._life is not None:
                self._life.cancel()

    def _check(self) -> None:
        if not self.alive:
            raise self._lost()

    def _lost(self) -> SandboxFault:
        why = f" ({self._reason.value})" if self._reason is not KillReason.NONE else ""
        return SandboxFault(FaultKind.SESSION_ENDED, f"the session has ended{why}: open another")


def _do_nothing() -> None:
    """Do nothing at the end of a session that nobody waits for."""


def _read_cell(answer: list[tuple[str, memoryview]]) -> tuple[tuple[Mapping[str, str], ...], CellError | None]:
    """Return what a cell showed, by media type, and its error; other parts come from the program and are dropped."""
    shown: list[dict[str, str]] = []
    said: dict[str, str] = {}
    lines = []
    for name, content in answer:
        pieces = (bytes(content[start : start + LARGE]) for start in range(0, len(content), LARGE))
        text = "".join(codecs.iterdecode(pieces, "utf-8", "replace"))
        if name == "shown":
            shown.append({})
        elif "/" in name and shown:
            shown[-1][name] = text
        elif name == "line":
            lines.append(text)
        else:
            said[name] = text
    error = None
    if "failure" in said:
        error = CellError("OutputError", said["failure"][:1000], ())
    elif "ename" in said:
        error = CellError(said["ename"], said.get("evalue", ""), tuple(lines))
    return tuple(shown), error
