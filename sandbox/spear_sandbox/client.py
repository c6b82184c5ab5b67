"""Running code on a sandbox service: ours, or a real SandboxFusion."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from spear_sandbox.protocol import (
    CellError,
    CellOutcome,
    CellStatus,
    FaultKind,
    KillReason,
    Limits,
    Outcome,
    SandboxFault,
    Session,
)
from spear_sandbox.service.wire import TOKEN_VARIABLE, BadReplyError, RunRequest, check_name, read_reply, write_request
from spear_sandbox.web.endpoints import Backoff, EndpointRing, Service, bound_answers, read_detail, read_urls
from spear_sandbox.web.listening import read_token

if TYPE_CHECKING:
    import httpx


CONNECT_S = 5.0
ANSWER_SLACK_S = 10.0
"""Seconds granted on top of both timeouts, as by verl's client."""
MAX_CONNECTIONS = 1024
KEPT_CONNECTIONS = 128
KEEPALIVE_S = 4.0
"""Seconds that an idle connection is kept: uvicorn closes it after 5, perhaps under the next request."""
RETRIED_ONCE = frozenset({502, 503})
MOST_RETRY_S = 60.0
"""The longest wait that a server can ask for."""
SERVICE = Service("a sandbox", "/run_code", 8080, TOKEN_VARIABLE)
LEFT_OUT = Backoff(first=2.0, longest=2.0, jitter=0.0)
"""Seconds for which a server that failed comes last."""
BETWEEN = Backoff(first=1.0, longest=math.inf)


@dataclass(frozen=True)
class Retries:
    """How often a run is sent again, and when."""

    busy: int = 3
    """Further tries after 504, and 503 with ``Retry-After``: all places of the server were taken."""
    broken: int = 1
    """Further tries after a connection that could not be made or broke, other 502 and 503, and a run that was lost."""
    backoff: Backoff = BETWEEN
    """Wait before each further try."""


class HttpExecutor:
    """An :class:`~spear_sandbox.protocol.Executor` over HTTP. Belongs to the event loop of its first run.

    A run is code without effects outside its sandbox, so one that was lost may be sent again. Proxies of the
    environment are not used.

    Args:
        urls: base addresses of servers that are alike, such as ``"http://127.0.0.1:8080"``; taken in turn. Several are
            meant for tests and small set-ups: beyond that, put a balancer before the servers.
        token: bearer token; by default the variable ``SPEAR_SANDBOX_TOKEN`` of the environment.
        limits: for runs without their own. ``wall_s`` and ``memory_mb`` go to the server, which sets the rest.
        queue_s: seconds that the server may let a run wait; sent as ``compile_timeout``, to which our server adds 5.
        retries: of runs that were not carried out.

    Raises:
        SpearError: an address is malformed.
        ModuleNotFoundError: httpx is not installed; at the first run.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        limits: Limits | None = None,
        queue_s: float = 30.0,
        retries: Retries | None = None,
    ) -> None:
        self.urls = read_urls(urls, SERVICE)
        self.limits = limits or Limits()
        self.queue_s = queue_s
        self.retries = retries or Retries()
        self._token = token
        self._rng = random.Random()
        self._ring = EndpointRing(self.urls, LEFT_OUT, self._rng)
        self._client: httpx.AsyncClient | None = None
        self._closed = False

    async def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        """Run on a server; see :meth:`spear_sandbox.protocol.Executor.run`.

        Raises SandboxFault if no server carried it out, ValueError for a file name that leaves the working folder, or
        if a server refused the request itself or its token.
        """
        for name in (*(files or ()), *fetch_files):
            check_name(name)
        wanted = limits or self.limits
        asked = RunRequest(
            code,
            run_timeout=wanted.wall_s,
            compile_timeout=self.queue_s,
            memory_mb=wanted.memory_mb,
            stdin=stdin,
            files=files or {},
            fetch_files=tuple(fetch_files),
        )
        return await self._ask(write_request(asked), self.queue_s + wanted.wall_s + ANSWER_SLACK_S)

    async def open_session(
        self,
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        idle_s: float | None = None,
    ) -> HttpSession:
        """Open a session on one of the servers, which all of its cells go to.

        Args:
            files: relative name → content; written into its working folder.
            limits: ``wall_s`` of one cell, and ``memory_mb``; the server sets the rest.
            idle_s: seconds after its last cell at which the server ends it, at most the server's default; None for
                that.

        Raises:
            SandboxFault: no session could be opened.
            ValueError: a server refused the request itself or its token.
        """
        wanted = limits or self.limits
        endpoint = self._ring.choose(asyncio.get_running_loop().time())
        slack_s = self.queue_s + ANSWER_SLACK_S

        async def send(method: str, path: str, body: bytes | None, seconds: float) -> httpx.Response:
            try:
                return await self._post(method, endpoint.url, path, body, seconds)
            except _Passing as failure:
                raise SandboxFault(failure.kind, str(failure)) from None

        asked = {
            "files": {name: base64.b64encode(content).decode("ascii") for name, content in (files or {}).items()},
            "memory_limit_MB": wanted.memory_mb,
            "cell_timeout": wanted.wall_s,
            "idle_timeout": idle_s,
        }
        answer = await send("POST", "/sessions", json.dumps(asked).encode("ascii"), slack_s)
        try:
            name = str(json.loads(answer.content)["session_id"])
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise SandboxFault(FaultKind.BAD_REPLY, f"{endpoint.url}: no session ({error!r}).") from None
        return HttpSession(send, name, cell_s=wanted.wall_s, slack_s=slack_s)

    async def close(self) -> None:
        """Close all connections; runs under way end with them."""
        self._closed = True
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, body: bytes, seconds: float) -> Outcome:
        """Send the run until there is an outcome, at most as often as ``retries`` allows."""
        loop = asyncio.get_running_loop()
        left = dict.fromkeys((FaultKind.UNAVAILABLE, FaultKind.MEMORY), self.retries.broken)
        left[FaultKind.TIMEOUT] = self.retries.busy
        tries = 0
        while True:
            endpoint = self._ring.choose(loop.time())
            tries += 1
            try:
                return await self._send(endpoint.url, body, seconds)
            except _Passing as failure:
                self._ring.note_failure(endpoint, loop.time())
                if left[failure.kind] == 0:
                    raise SandboxFault(failure.kind, f"{failure} (try {tries}, the last)") from None
                left[failure.kind] -= 1
                wait_s = failure.wait_s
            await asyncio.sleep(max(wait_s, self.retries.backoff.choose_wait(tries, self._rng)))

    async def _send(self, url: str, body: bytes, seconds: float) -> Outcome:
        """Try once. Raises _Passing if another try may do better, else SandboxFault or ValueError."""
        response = await self._post("POST", url, "/run_code", body, seconds)
        try:
            return read_reply(response.content)
        except BadReplyError as error:
            raise SandboxFault(FaultKind.BAD_REPLY, f"{url}: {error}.") from None
        except SandboxFault as fault:  # its sandbox died under the run, say: it starts another
            raise _Passing(fault.kind, f"{url}: {fault}") from None

    async def _post(self, method: str, url: str, path: str, body: bytes | None, seconds: float) -> httpx.Response:
        """Send one request and return a successful answer. Raises as :meth:`_send`."""
        import httpx

        headers = {"Content-Type": "application/json"}
        token = self._token or read_token(TOKEN_VARIABLE)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            request = self._open_client().request(method, f"{url}{path}", content=body, headers=headers)
            response = await asyncio.wait_for(request, seconds)
        except asyncio.TimeoutError:
            raise SandboxFault(FaultKind.TIMEOUT, f"no answer from {url} within {seconds:g} s") from None
        except httpx.TransportError as error:
            sentence = f"{url} cannot be reached or broke off ({type(error).__name__}: {error})"
            raise _Passing(FaultKind.UNAVAILABLE, sentence) from None
        except httpx.DecodingError as error:
            raise SandboxFault(FaultKind.BAD_REPLY, f"{url}: {error}.") from None
        status = response.status_code
        asked = response.headers.get("retry-after", "") if status == 503 else ""
        if status == 504 or asked.isdecimal():
            wait_s = min(float(asked or 0), MOST_RETRY_S)
            raise _Passing(FaultKind.TIMEOUT, f"{url} had no free place: {read_detail(response)}", wait_s)
        if status in RETRIED_ONCE:
            raise _Passing(FaultKind.UNAVAILABLE, f"{url} answered {status}: {read_detail(response)}")
        if status == 410:
            raise SandboxFault(FaultKind.SESSION_ENDED, f"{url}: {read_detail(response)}")
        if status == 401:
            raise ValueError(f"{url} refused the token (status {status}): set {TOKEN_VARIABLE} to the server's.")
        if status in (400, 403, 413, 422):
            raise ValueError(f"{url} refused the request (status {status}): {read_detail(response)}")
        if status not in (200, 201):
            raise SandboxFault(FaultKind.BAD_REPLY, f"{url} answered {status}: {read_detail(response)}")
        return response

    def _open_client(self) -> httpx.AsyncClient:
        import httpx

        if self._closed:
            raise SandboxFault(FaultKind.UNAVAILABLE, "the sandbox client is closed")
        if self._client is None:
            self._client = httpx.AsyncClient(
                limits=httpx.Limits(
                    max_connections=MAX_CONNECTIONS,
                    max_keepalive_connections=KEPT_CONNECTIONS,
                    keepalive_expiry=KEEPALIVE_S,
                ),
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                headers={"User-Agent": "spear-sandbox"},
                # A proxy for the outside world would also be asked for 127.0.0.1.
                trust_env=False,
            )
            bound_answers(self._client)
        return self._client


class _Passing(Exception):
    """A failure after which the run may be sent again."""

    def __init__(self, kind: FaultKind, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.wait_s = wait_s


Send = Callable[[str, str, bytes | None, float], Awaitable["httpx.Response"]]
"""Sends a request of a session (method, path, body, seconds) once, since cells have effects; returns a good answer.

Raises SandboxFault if the session has ended or the request was not carried out, ValueError if it was refused.
"""


class HttpSession(Session):
    """See :class:`spear_sandbox.protocol.Session`; made by :meth:`spear_sandbox.client.HttpExecutor.open_session`.

    A cell may take ``cell_s`` seconds, and an answer ``slack_s`` more.
    """

    def __init__(self, send: Send, name: str, *, cell_s: float, slack_s: float) -> None:
        self.id = name
        self._send_once = send
        self._cell_s = cell_s
        self._slack_s = slack_s

    async def run(self, code: str, *, timeout_s: float | None = None) -> CellOutcome:
        seconds = min(timeout_s or self._cell_s, self._cell_s)
        body = json.dumps({"code": code, "timeout": seconds}).encode("ascii")
        return _read_cell(await self._send("POST", "/run", body, seconds))

    async def write_file(self, name: str, content: bytes) -> None:
        check_name(name)  # httpx resolves "..", so the request would go to another path
        await self._send("PUT", f"/files/{quote(name)}", content)

    async def read_file(self, name: str) -> bytes:
        check_name(name)
        return await self._send("GET", f"/files/{quote(name)}")

    async def list_files(self) -> dict[str, int]:
        files: dict[str, int] = json.loads(await self._send("GET", "/files"))
        return files

    async def interrupt(self) -> None:
        await self._send("POST", "/interrupt", b"")

    async def close(self) -> None:
        """See :meth:`spear_sandbox.protocol.Session.close`; it may already have ended."""
        try:
            await self._send("DELETE", "")
        except SandboxFault as fault:
            if fault.kind is not FaultKind.SESSION_ENDED:
                raise

    async def _send(self, method: str, path: str, body: bytes | None = None, seconds: float = 0.0) -> bytes:
        answer = await self._send_once(method, f"/sessions/{self.id}{path}", body, seconds + self._slack_s)
        return answer.content


def _read_cell(body: bytes) -> CellOutcome:
    try:
        said: dict[str, Any] = json.loads(body)
        errors = [CellError(item["ename"], item["evalue"], tuple(item["traceback"])) for item in said["error"]]
        return CellOutcome(
            status=CellStatus(said["status"]),
            stdout=said["stdout"],
            stderr=said["stderr"],
            display=tuple(said["display"]),
            error=errors[0] if errors else None,
            wall_s=said["execution_time"],
            truncated=said["truncated"],
            reason=KillReason(said["reason"]),
        )
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise SandboxFault(FaultKind.BAD_REPLY, f"the answer is not an outcome of a cell: {error!r}") from None
