"""The page over HTTP, for this machine only."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spear_agents.replay.page import make_policy, render_page
from spear_agents.replay.play import Stage
from spear_agents.replay.runs import Run
from spear_envs.core.errors import SpearError

HOST = "127.0.0.1"
PORT = 8700
LONGEST_BODY = 1_000_000
_log = logging.getLogger(__name__)


class PageServer(ThreadingHTTPServer):
    """Serves a run, and the game of ``spear play --browser`` if there is a stage.

    Requests use numbers and known names, never paths of files. It listens on the loopback interface. A page of another
    site can reach that too, so a request must name this host, and the page's own requests carry a token. Raises
    SpearError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: Run, stage: Stage | None = None, port: int = PORT) -> None:
        self.run = run
        self.stage = stage
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SpearError(f"port {port} is not available ({error}): choose another, or 0 for a free one") from error

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    def answer(self, method: str, path: str, content: Any) -> Any:
        """The JSON value for a request of the page. Raises LookupError for an unknown name, SpearError if it fails."""
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
        if self.stage is not None and method == "POST" and path.startswith("/api/play/") and isinstance(content, dict):
            return self.stage.perform(path.removeprefix("/api/play/"), content)
        raise LookupError(path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors of a connection, except that a browser closed it."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            _log.exception("the connection from %s broke", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        method = self.command
        content = self._read_content() if method == "POST" else None
        host, _, port = self.headers.get("Host", "").rpartition(":")
        path = self.path.partition("?")[0]
        if host not in (HOST, "localhost") or port != str(self.server.server_port):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for this machine only")
        elif method == "GET" and path == "/":
            page = render_page({"title": self.server.run.title, "token": self.server.token})
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8"))
        elif not secrets.compare_digest(self.headers.get("X-Spear-Token", "").encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the page is of an earlier server: load it again")
        else:
            self._answer(method, path, content)

    do_POST = do_GET

    def _answer(self, method: str, path: str, content: Any) -> None:
        try:
            value = self.server.answer(method, path, content)
        except LookupError:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")
        except SpearError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except Exception as error:
            _log.exception("%s %s", method, path)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, repr(error))
        else:
            self._send_json(HTTPStatus.OK, value)

    def _read_content(self) -> Any:
        """The JSON of a request, or None; the connection is closed if it cannot be read completely."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,9}", length, re.ASCII) or int(length) > LONGEST_BODY:
            self.close_connection = True
            return None
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send_json(status, {"error": why})

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
        self._send(status, "application/json", data)

    def _send(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Content-Security-Policy": f"{make_policy()}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
