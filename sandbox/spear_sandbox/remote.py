"""Sessions of a service, seen from its client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from spear_sandbox.protocol import CellError, CellOutcome, CellStatus, FaultKind, KillReason, SandboxFault, Session

if TYPE_CHECKING:
    import httpx


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
        await self._send("PUT", f"/files/{quote(name)}", content)

    async def read_file(self, name: str) -> bytes:
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
