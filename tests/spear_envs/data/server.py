"""A real HTTP server on 127.0.0.1 that gives files well, badly or not at all."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler"], None]


@dataclass
class Site:
    """What the server answers at each path: its answers in turn, the last one for ever."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    address: str = ""

    def put(self, path: str, *answers: Answer) -> str:
        """Make the server answer at ``path``; returns the address."""
        self.answers[path] = list(answers)
        return f"{self.address}{path}"

    def ranges(self) -> list[str | None]:
        """The ``Range`` of each request so far."""
        return [headers.get("range") for _, headers in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        self.site.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        answers = self.site.answers.get(self.path, [status(404)])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def say(self, code: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        """Send an answer; ``length`` is what Content-Length claims."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if length is not None and length > len(body):
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class QuietServer(ThreadingHTTPServer):
    """One that writes nothing to the tests' error output when a client goes away; what else fails is shown."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve(site: Site) -> ThreadingHTTPServer:
    """Start a server in a thread."""
    server = QuietServer(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site}))
    site.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def status(code: int, **headers: str) -> Answer:
    return lambda handler: handler.say(code, b"sorry", **headers)


def page(title: str, code: int = 200, kind: str = "text/html; charset=utf-8") -> Answer:
    body = f"<!DOCTYPE html><html><head><title>{title}</title></head><body>click here</body></html>".encode()
    return lambda handler: handler.say(code, body, Content_Type=kind)


def whole(body: bytes, **headers: str) -> Answer:
    """The file, whatever range is asked for."""
    return lambda handler: handler.say(200, body, **headers)


def cut(body: bytes, after: int, **headers: str) -> Answer:
    """Announces the file and breaks off."""
    return lambda handler: handler.say(200, body[:after], length=len(body), **headers)


def ranged(body: bytes, etag: str | None = '"v1"', stop: int | None = None, **headers: str) -> Answer:
    """The file as a good server gives it: by ranges, if it has not changed. With ``stop``, breaks off at that byte."""

    def answer(handler: Handler) -> None:
        marks = {"ETag": etag, **headers} if etag else headers
        found = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        condition = handler.headers.get("If-Range")
        if found is None or (condition is not None and condition not in marks.values()):
            handler.say(200, body[:stop], length=len(body), **marks)
        elif (start := int(found[1])) >= len(body):
            handler.say(416, Content_Range=f"bytes */{len(body)}", **marks)
        else:
            reach = f"bytes {start}-{len(body) - 1}/{len(body)}"
            handler.say(206, body[start:stop], length=len(body) - start, Content_Range=reach, **marks)

    return answer
