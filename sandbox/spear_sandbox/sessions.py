"""A session from outside: a run that lasts from cell to cell and is stopped in between."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spear_sandbox.admission import Admission
from spear_sandbox.backends import Backend
from spear_sandbox.cgroups import OomKill
from spear_sandbox.guest.job import Job, Verdict, unpack_record
from spear_sandbox.guest.supervisor import GO_ON, INTERRUPT, REST
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
from spear_sandbox.runs import Stream, make_job, open_pipes
from spear_sandbox.warm import SESSION_MODULES
from spear_sandbox.wire import check_name
from spear_sandbox.zygotes import send_signal, wait_readable

LONGEST_S = 86_400.0
"""The longest life of a session."""
MAX_FILE_BYTES = 8 << 20
_GRACE_S = 3.0
"""How long an interrupted cell may take to end before its session is ended."""
_MAX_FRAME = 25 << 20
_FILE_S = 20.0


class LocalSession(Session):
    """See :class:`spear_sandbox.protocol.Session`. Belongs to one event loop; made by :meth:`open`.

    A cell takes a place of ``admission``, an idle session none. ``limits.wall_s`` is that of one cell.
    """

    def __init__(self, admission: Admission, limits: Limits) -> None:
        self.id = secrets.token_hex(16)
        self.used = time.monotonic()
        """When the last cell ended."""
        self.running = False
        self.on_end: Callable[[], None] = lambda: None
        """Called once, when it has ended."""
        self._limits = limits
        self._admission = admission
        self._turn = asyncio.Lock()
        self._number = 0
        self._received = bytearray()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._ended = asyncio.Event()
        self._reason = KillReason.NONE
        self._life: asyncio.Task[None] | None = None
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
    def alive(self) -> bool:
        """Whether cells can be run."""
        return not self._ended.is_set()

    async def run(self, code: str, *, timeout_s: float | None = None) -> CellOutcome:
        seconds = min(timeout_s or self._limits.wall_s, self._limits.wall_s)
        async with self._turn:
            self._check()
            await self._admission.enter(None)
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
                self._admission.leave()

    async def write_file(self, name: str, content: bytes) -> None:
        check_name(name)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"the file {name[:80]!r} has more than {MAX_FILE_BYTES >> 20} MiB: send smaller ones.")
        await self._do("write", name=name, content=base64.b64encode(content).decode())

    async def read_file(self, name: str) -> bytes:
        check_name(name)
        answer = await self._do("read", name=name)
        try:
            return base64.b64decode(str(answer["content"]), validate=True)
        except (KeyError, ValueError) as error:
            raise SandboxFault(FaultKind.BAD_REPLY, f"the session's answer is not a file: {error!r}") from None

    async def list_files(self) -> dict[str, int]:
        files = (await self._do("list")).get("files")
        if not isinstance(files, dict) or not all(isinstance(size, int) for size in files.values()):
            raise SandboxFault(FaultKind.BAD_REPLY, "the session's answer is not a list of files")
        return files

    async def interrupt(self) -> None:
        self._check()
        if self.running:
            self._order(INTERRUPT)

    async def close(self) -> None:
        self._kill(KillReason.NONE)
        if self._life is not None:
            await asyncio.wait((self._life,))

    async def _do(self, action: str, **arguments: str) -> dict[str, Any]:
        """Have the session's process do something with files."""
        async with self._turn:
            self._check()
            self._order(GO_ON)
            try:
                answer = await self._ask(action, _FILE_S, **arguments)
            except asyncio.TimeoutError:
                self._kill(KillReason.TIMEOUT)
                raise SandboxFault(FaultKind.SESSION_ENDED, "the session did not answer and was ended") from None
            finally:
                self._order(REST)
                self.used = time.monotonic()
        if "failure" in answer:
            raise ValueError(f"the session refused the file: {str(answer['failure'])[:200]}")
        return answer

    async def _run(self, code: str, seconds: float) -> CellOutcome:
        for stream in self._streams:
            stream.start_again()
        self._order(GO_ON)
        started = time.monotonic()
        status = CellStatus.FINISHED
        answer: dict[str, Any] = {}
        try:
            task = asyncio.ensure_future(self._ask("run", None, code=code))
            try:
                answer = await asyncio.wait_for(asyncio.shield(task), seconds)
            except asyncio.TimeoutError:
                status = CellStatus.TIME_LIMIT
                self._order(INTERRUPT)
                try:
                    answer = await asyncio.wait_for(task, _GRACE_S)
                except asyncio.TimeoutError:
                    self._kill(KillReason.TIMEOUT)
                    await self._ended.wait()
            finally:
                task.cancel()
        except SandboxFault:
            await self._ended.wait()
        if not self.alive:
            status = CellStatus.ENDED
        for stream in self._streams:
            stream.read_rest(self._limits.max_output)
        out, error = self._streams
        return CellOutcome(
            status=status,
            stdout=out.text(),
            stderr=error.text(),
            display=_read_display(answer.get("display")),
            error=_read_error(answer),
            wall_s=time.monotonic() - started,
            truncated=any(stream.count > len(stream.data) for stream in self._streams),
            reason=self._reason if status is CellStatus.ENDED else KillReason.NONE,
        )

    async def _ask(self, action: str, seconds: float | None, **arguments: str) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises SandboxFault if the session ends, TimeoutError."""
        loop = asyncio.get_running_loop()
        self._number += 1
        self._answer = loop.create_future()
        asked = {"action": action, "arguments": arguments, "number": self._number}
        body = json.dumps(asked).encode("ascii")

        async def ask() -> dict[str, Any]:
            assert self._answer is not None
            with contextlib.suppress(OSError):  # it has hung up
                await loop.sock_sendall(self._line, len(body).to_bytes(4, "big") + body)
            ended = asyncio.ensure_future(self._ended.wait())
            try:
                await asyncio.wait((self._answer, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
            if not self._answer.done():
                raise self._lost()
            return self._answer.result()

        return await asyncio.wait_for(ask(), seconds)

    async def _live(self, backend: Backend, job: Job, started: asyncio.Future[None]) -> None:
        """Hold everything that belongs to the session until its run has ended."""
        try:
            async with backend.borrow(SESSION_MODULES) as fork:
                with contextlib.ExitStack() as opened:
                    watch = None
                    if backend.groups is not None:
                        watch = opened.enter_context(backend.groups.lend(self._limits))
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
                        report.read_rest(1 << 20)
                        record = unpack_record(bytes(report.data))
                        if self._reason is KillReason.NONE and (
                            (record is not None and record.verdict == Verdict.MEMORY)
                            or (watch is not None and watch.judge() is OomKill.OWN)
                        ):
                            self._reason = KillReason.MEMORY
                        self._ended.set()
        finally:
            self._ended.set()
            self.on_end()

    async def _follow(self, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._line.fileno(), self._hear)
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

    def _hear(self) -> None:
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
            loop.call_later(_GRACE_S, self._kill, KillReason.NONE)
            return
        self._received += part
        while len(self._received) >= 4:
            size = int.from_bytes(self._received[:4], "big")
            if size > _MAX_FRAME:  # the program itself wrote to the socket
                self._kill(KillReason.OUTPUT)
                return
            if len(self._received) < 4 + size:
                return
            body = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            self._take(body)

    def _take(self, body: bytes) -> None:
        try:
            answer = json.loads(body)
            number = answer["number"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return
        # The program can write anything; only the answer to the last question counts.
        if number == self._number and self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

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


def _read_display(value: Any) -> tuple[Mapping[str, str], ...]:
    """What a cell showed; malformed parts, which the program may have written, are left out."""
    shown = value if isinstance(value, list) else []
    return tuple(
        {kind: text for kind, text in forms.items() if isinstance(text, str)}
        for forms in shown
        if isinstance(forms, dict)
    )


def _read_error(answer: Mapping[str, Any]) -> CellError | None:
    if "failure" in answer:
        return CellError("OutputError", str(answer["failure"])[:1000], ())
    error = answer.get("error")
    if not isinstance(error, dict):
        return None
    lines = error.get("traceback")
    traceback = tuple(map(str, lines)) if isinstance(lines, list) else ()
    return CellError(str(error.get("ename")), str(error.get("evalue")), traceback)
