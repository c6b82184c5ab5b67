"""Warm interpreters from outside: start one, ask it to fork, notice its death."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from spear_sandbox.guest.root import Settings
from spear_sandbox.guest.warmth import COMMON_MODULES
from spear_sandbox.guest.zygote import LOCKS, READY, SPAWN, SPAWNED, STARVED, USERS
from spear_sandbox.installation import Installation
from spear_sandbox.protocol import FaultKind, SandboxFault

START_S = 120.0
_END_S = 5.0


class RefusedError(Exception):
    """The kernel or this container does not allow the isolation; the message is the kernel's."""


class LostRunError(SandboxFault):
    """Something outside ended the run or its interpreter; another try may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(FaultKind.UNAVAILABLE, message)


class Zygote:
    """One warm interpreter in its own namespaces. Belongs to one event loop.

    When it ends, all of its runs end.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, *, traits: bytes) -> None:
        self.keeps_locks = LOCKS in traits
        """Whether supervisors decide on file locks."""
        self.parts_users = USERS in traits
        """Whether each run has its own user id."""
        self.forked = 0
        """Runs started so far."""
        self.running = 0
        """Runs in progress; counted by the pool."""
        self._process = process
        self._control = control
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the interpreter is gone."""
        self._loop.add_reader(control.fileno(), self._read)

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return not self.ended.done()

    @property
    def pid(self) -> int:
        """The process outside the namespaces that holds it."""
        return self._process.pid

    async def fork(self, descriptors: Sequence[int]) -> int:
        """Start a run with these descriptors; return a pidfd of its supervisor, which the caller closes.

        Raises LostRunError if the interpreter is gone, SandboxFault if the kernel refuses another process.
        """
        if not self.alive:
            raise _gone()
        answer: asyncio.Future[int] = self._loop.create_future()
        while True:
            try:
                socket.send_fds(self._control, [SPAWN], descriptors)
                break
            except OSError as error:
                # Its socket is full, or more descriptors of this user are in flight than the kernel allows.
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    self._end()  # else the next one would also be sent here
                    raise _gone() from error
                await asyncio.sleep(0.005)
                if not self.alive:
                    raise _gone() from error
        self.forked += 1
        self._waiting.append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                send_signal(answer.result(), signal.SIGKILL)  # closing the pidfd does not end it
                os.close(answer.result())
            raise

    def _read(self) -> None:
        while self.alive:
            try:
                message, received, _, _ = socket.recv_fds(self._control, 4096, 1)
            except BlockingIOError:
                return
            except OSError:
                message, received = b"", []
            if not message:
                self._end()
                return
            answer = self._waiting.popleft()
            if message == SPAWNED and not received:
                # The descriptor is lost, and with it the run, which ends at its own time limit.
                if not answer.done():
                    text = "this process has too many open files to follow a run: raise its limit (ulimit -n)"
                    answer.set_exception(SandboxFault(FaultKind.UNAVAILABLE, text))
            elif message == SPAWNED:
                if answer.done():  # cancelled; closing the pipes does not end it
                    send_signal(received[0], signal.SIGKILL)
                    os.close(received[0])
                else:
                    answer.set_result(received[0])
            elif not answer.done():
                text = message[1:].decode("utf-8", "replace")
                fault = SandboxFault(FaultKind.UNAVAILABLE, f"no new process for a run: {text}")
                answer.set_exception(lack_memory(text) if message.startswith(STARVED) else fault)

    def _end(self) -> None:
        if self.alive:
            self._loop.remove_reader(self._control.fileno())
            # Not only closed: forked processes have copies.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self.ended.set_result(None)
            for answer in self._waiting:
                if not answer.done():
                    answer.set_exception(_gone())
            self._waiting.clear()

    async def close(self) -> None:
        """End the interpreter and all of its runs, and wait until they are gone."""
        self._end()
        await end_process(self._process)


def lack_memory(why: str) -> SandboxFault:
    """Return the fault of a run that was not started because others hold the memory."""
    return SandboxFault(FaultKind.MEMORY, f"no memory to start the run ({why}): lower --max-running or --memory-mb")


def _gone() -> LostRunError:
    return LostRunError("the sandbox's interpreter has died and is being restarted")


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal a process unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def wait_readable(fd: int) -> None:
    """Wait until there is something to read or, for a pidfd, until the process has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def end_process(process: subprocess.Popen[bytes], patience_s: float = _END_S) -> None:
    """Wait for a child that is about to end; kill it if it takes too long."""
    if process.poll() is not None:
        return
    pidfd = os.pidfd_open(process.pid)
    try:
        try:
            await asyncio.wait_for(wait_readable(pidfd), patience_s)
        except asyncio.TimeoutError:
            process.kill()
            await wait_readable(pidfd)
    finally:
        os.close(pidfd)
        process.wait()


async def start_zygote(installation: Installation, modules: Sequence[str], *, uid: int) -> Zygote:
    """Start an interpreter in its namespaces and wait until it has imported its modules, and common ones.

    ``uid`` is the user inside if this process is root; else it is this process's. Raises RefusedError if the sandbox
    could not be built, SandboxFault if the interpreter did not become ready.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    settings: Settings = {
        "control": theirs.fileno(),
        "uid": uid if os.getuid() == 0 else os.getuid(),
        "interpreter": installation.interpreter,
        "prefix": installation.prefix,
        "guest": installation.guest,
        "packages": installation.packages,
        "helpers": installation.helpers,
        "modules": [*COMMON_MODULES, *modules],
    }
    source = str(Path(installation.guest).parent.parent)
    boot = f"import sys; sys.path.insert(0, {source!r}); from spear_sandbox.guest.root import enter; enter()"
    with theirs:
        process = subprocess.Popen(
            [installation.interpreter, "-I", "-S", "-c", boot, json.dumps(settings)],
            pass_fds=[theirs.fileno()],
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if sys.flags.dev_mode else subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    try:
        await asyncio.wait_for(wait_readable(ours.fileno()), START_S)
        message = ours.recv(4096)
    except BaseException as error:
        ours.close()
        process.kill()
        process.wait()
        if isinstance(error, asyncio.TimeoutError):
            raise SandboxFault(FaultKind.UNAVAILABLE, f"no warm interpreter within {START_S:g} s") from None
        raise
    if not message.startswith(READY):
        ours.close()
        await end_process(process)
        if message:
            raise RefusedError(message[1:].decode("utf-8", "replace"))
        raise SandboxFault(
            FaultKind.UNAVAILABLE,
            f"the interpreter ended at its start with code {process.returncode}: {installation.interpreter}",
        )
    return Zygote(process, ours, traits=message[1:])
