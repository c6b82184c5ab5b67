"""Sandbox services for tests: the real command in a process, or the real application in this one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import pytest

from spear_sandbox.protocol import FaultKind, Health, Isolation, KillReason, Limits, Outcome, RunStatus, SandboxFault
from tests import commands
from tests.commands import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from spear_sandbox.service.server import RunService, ServedExecutor


class ScriptedExecutor:
    """Runs nothing: a run waits for the gate and ends as its code says, for tests of what is around the sandbox."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []
        self.limits: list[Limits | None] = []
        self.inputs: list[tuple[str | None, Mapping[str, bytes] | None, Sequence[str]]] = []
        self.open = True
        self.ok = True

    def health(self) -> Health:
        return Health(Isolation.NAMESPACES, {"userns": True, "cgroup": False}, 2 if self.ok else 0, 0, self.ok)

    async def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        self.started.append(code)
        self.limits.append(limits)
        self.inputs.append((stdin, files, fetch_files))
        try:
            while not self.open:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.killed.append(code)
            raise
        if code == "fault":
            raise SandboxFault(FaultKind.UNAVAILABLE, "the zygote died")
        if code == "bug":
            raise RuntimeError("a bug of the pool")
        return make_outcome(**json.loads(code)) if code.startswith("{") else make_outcome(stdout=code)

    async def open_session(self, **_: Any) -> NoReturn:
        raise SandboxFault(FaultKind.UNAVAILABLE, "nothing runs here")

    async def close(self) -> None:
        self.open = True


def make_outcome(**fields: Any) -> Outcome:
    """An outcome of a run that ended well, but for the fields given."""
    values: dict[str, Any] = {
        "status": RunStatus.FINISHED,
        "return_code": 0,
        "stdout": "",
        "stderr": "",
        "wall_s": 0.25,
        "cpu_s": 0.125,
        "peak_rss_kb": 4096,
        "queue_s": 0.0,
        "stdout_bytes": 0,
        "stderr_bytes": 0,
        "truncated": False,
        "level": Isolation.NAMESPACES,
        "reason": KillReason.NONE,
        **fields,
    }
    values["status"] = RunStatus(values["status"])
    values["reason"] = KillReason(values["reason"])
    return Outcome(**values)


@dataclass
class RunningService:
    """An application that answers."""

    url: str
    service: RunService


@contextmanager
def run_service(start: Callable[[], Awaitable[ServedExecutor]], **settings: Any) -> Iterator[RunningService]:
    """Serve from a thread of this process, over the executor that ``start`` makes on its loop."""
    import uvicorn

    from spear_sandbox.pool.admission import ServiceSettings
    from spear_sandbox.service.server import RunService, make_app
    from spear_sandbox.web.listening import bind_socket

    listener = bind_socket("127.0.0.1", 0)
    ready: list[RunningService] = []
    servers: list[uvicorn.Server] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        executor = await start()
        try:
            service = RunService(executor, ServiceSettings(**{"max_running": 4, **settings}))
            config = uvicorn.Config(
                make_app(lambda: service), lifespan="off", log_config=None, timeout_graceful_shutdown=2
            )
            servers.append(uvicorn.Server(config))
            ready.append(RunningService(f"http://127.0.0.1:{listener.getsockname()[1]}", service))
            await servers[0].serve([listener])
        finally:
            await executor.close()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(ready or failures))
        if failures:
            raise failures[0]
        yield ready[0]
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        listener.close()


@contextmanager
def run_scripted(**settings: Any) -> Iterator[tuple[RunningService, ScriptedExecutor]]:
    """A service over a :class:`ScriptedExecutor`."""
    executor = ScriptedExecutor()

    async def start() -> ScriptedExecutor:
        return executor

    with run_service(start, **settings) as running:
        yield running, executor


@contextmanager
def run_local(limits: Limits, max_running: int, **settings: Any) -> Iterator[RunningService]:
    """A service over the real sandbox; skips the test where no isolation holds."""
    from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor

    async def start() -> LocalExecutor:
        executor = LocalExecutor(limits=limits, max_running=max_running)
        await executor.start()
        return executor

    try:
        context = run_service(start, max_running=max_running, limits=limits, **settings)
        running = context.__enter__()
    except IsolationRefusedError as error:
        pytest.skip(f"no isolation holds here: {error}")
    try:
        yield running
    finally:
        context.__exit__(None, None, None)


@functools.cache
def _find_refusal() -> str | None:
    from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor

    async def start() -> None:
        executor = LocalExecutor(zygotes=1)
        try:
            await executor.start()
        finally:
            await executor.close()

    try:
        asyncio.run(start())
    except IsolationRefusedError as error:
        return str(error)
    return None


def need_isolation() -> None:
    """Skip the test where no strong isolation holds."""
    if (reason := _find_refusal()) is not None:
        pytest.skip(f"no isolation holds here: {reason}")


def find_processes(name: str) -> list[int]:
    """Return the live processes that call themselves so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = "\nState:\tZ" not in (folder / "status").read_text()
            if alive and (folder / "comm").read_text().strip() == name[:15]:
                found.append(int(folder.name))
    return found


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def list_below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = list_children(pid)
    for child in found:
        found += list_children(child)
    return found


def ask(
    url: str, body: Any, method: str = "POST", path: str = "/run_code", *, patience: float = PATIENCE_S, **headers: str
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, content and headers of one request; the content is read as JSON where it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=patience)
    sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, sent, headers)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    is_json = response.headers.get("content-type") == "application/json"
    return response.status, json.loads(content) if is_json else content.decode(), response.headers


run_command = partial(commands.run_command, "sandbox")
"""``spear sandbox serve``, see :func:`tests.commands.run_command`."""
