"""The page over HTTP, for this machine only, on the bounded server of all services."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import threading
from http import HTTPStatus
from types import TracebackType
from typing import Any

from spear_agents.replay.page import make_policy, render_page
from spear_agents.replay.play import Stage
from spear_agents.replay.runs import Run
from spear_envs.core.errors import SpearError
from spear_sandbox.web.listening import bind_socket
from spear_sandbox.web.serving import ConnectionLimits, make_server, stop_on_signals

HOST = "127.0.0.1"
PORT = 8700
LONGEST_BODY = 1_000_000
BODY_S = 30.0
CONNECTIONS = 64
"""One browser opens six."""
DRAIN_S = 2
_log = logging.getLogger(__name__)


class PageServer:
    """Serves a run, and the game of ``spear play --browser`` if there is a stage.

    Requests use numbers and known names, never paths of files. It listens on the loopback interface. A page of another
    site can reach that too, so a request must name this host, and the page's own requests carry a token. Raises
    SpearError if the port is taken.
    """

    def __init__(self, run: Run, stage: Stage | None = None, port: int = PORT) -> None:
        self.run = run
        self.stage = stage
        self.token = secrets.token_urlsafe(24)
        self._listener = bind_socket(HOST, port)
        self.server_address: tuple[str, int] = self._listener.getsockname()[:2]
        self._reading = threading.Lock()
        limits = ConnectionLimits(connections=CONNECTIONS)
        self._server = make_server(
            self._answer, drain_s=DRAIN_S, limits=limits, lifespan="off", ws="none", interface="asgi3"
        )

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    @property
    def server_port(self) -> int:
        """The port that it listens on."""
        return self.server_address[1]

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    def serve_forever(self) -> None:
        """Answer until :meth:`shutdown`, or a signal in the main thread."""
        if threading.current_thread() is threading.main_thread():
            with stop_on_signals(self._server):
                self._server.run(sockets=[self._listener])
        else:
            self._server.run(sockets=[self._listener])

    def shutdown(self) -> None:
        """Have :meth:`serve_forever` return soon."""
        self._server.should_exit = True

    def answer(self, method: str, path: str, content: Any) -> Any:
        """The JSON value for a request of the page. Raises LookupError for an unknown name, SpearError if it fails."""
        if self.stage is not None and method == "POST" and path.startswith("/api/play/") and isinstance(content, dict):
            return self.stage.perform(path.removeprefix("/api/play/"), content)
        with self._reading:
            return self._read(method, path, content)

    def _read(self, method: str, path: str, content: Any) -> Any:
        if (method, path) == ("GET", "/api/run"):
            self.run.refresh()
            return {**self.run.summarise(), "play": self.stage is not None}
        if (method, path) == ("GET", "/api/mark"):
            return {"mark": self.run.mark()}
        if (
            (method, path) == ("POST", "/api/search")
            and isinstance(content, dict)
            and isinstance(content.get("text"), str)
        ):
            return {"episodes": self.run.search(content["text"])}
        episode = re.fullmatch(r"/api/episode/(\d{1,9})", path, re.ASCII)
        if method == "GET" and episode:
            return self.run.read_episode(int(episode[1]))
        raise LookupError(path)

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request of HTTP, by ASGI."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status, kind, data = await self._decide(scope["method"], scope["raw_path"], headers, receive)
        fields = {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Content-Security-Policy": f"{make_policy()}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        head = [(name.encode("ascii"), value.encode("ascii")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status.value, "headers": head})
        await send({"type": "http.response.body", "body": data})

    async def _decide(
        self, method: str, raw_path: bytes, headers: dict[str, str], receive: Any
    ) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body of the answer."""
        path = raw_path.decode("latin-1")
        host, _, port = headers.get("host", "").rpartition(":")
        if method not in ("GET", "POST"):
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page answers GET and POST")
        if host not in (HOST, "localhost") or port != str(self.server_port):
            return _refuse(HTTPStatus.FORBIDDEN, "this page is for this machine only")
        if method == "GET" and path == "/":
            page = render_page({"title": self.run.title, "token": self.token})
            return HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8")
        if not secrets.compare_digest(headers.get("x-spear-token", "").encode(), self.token.encode()):
            return _refuse(HTTPStatus.FORBIDDEN, "the page is of an earlier server: load it again")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LONGEST_BODY:
            return _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LONGEST_BODY} bytes")
        try:
            content = await asyncio.wait_for(_read_content(receive), BODY_S) if method == "POST" else None
            return _write(HTTPStatus.OK, await asyncio.to_thread(self.answer, method, path, content))
        except asyncio.TimeoutError:
            return _refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {BODY_S:g} s")
        except LookupError:
            return _refuse(HTTPStatus.NOT_FOUND, "not found")
        except SpearError as error:
            return _refuse(HTTPStatus.CONFLICT, str(error))
        except Exception as error:
            _log.exception("%s %s", method, path)
            return _refuse(HTTPStatus.INTERNAL_SERVER_ERROR, repr(error))


async def _read_content(receive: Any) -> Any:
    """The JSON of a request; None if it is not JSON, or too long."""
    body = b""
    more = True
    while more and len(body) <= LONGEST_BODY:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    try:
        return None if more or len(body) > LONGEST_BODY else json.loads(body)
    except (ValueError, RecursionError):
        return None


def _refuse(status: HTTPStatus, why: str) -> tuple[HTTPStatus, str, bytes]:
    return _write(status, {"error": why})


def _write(status: HTTPStatus, value: Any) -> tuple[HTTPStatus, str, bytes]:
    return status, "application/json", json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
