"""A local server of chat completions that answers from a script, as badly as servers do."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from spear_agents.engines.openai import Server
from tests.spear_envs.data.server import QuietServer

Answer = Callable[["Handler"], None]
GO = "<think>on</think><action>go</action>"


def complete(text: str | None = GO, **changes: Any) -> dict[str, Any]:
    """A whole answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}}
    return {"model": "served-name", "choices": [choice | changes.pop("choice", {})], "usage": usage} | changes


class Handler(BaseHTTPRequestHandler):
    """Gives the answers of its server in their order; the last one again and again."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = self.server.script
        with script.lock:
            script.requests.append(body)
            script.keys.append(self.headers.get("Authorization"))
            script.paths.append(self.path)
            script.headers.append({name.lower(): value for name, value in self.headers.items()})
            script.times.append(time.monotonic())
            script.running += 1
            script.most = max(script.most, script.running)
            answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
        try:
            answer(self)
        finally:
            with script.lock:
                script.running -= 1

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@dataclass
class Script:
    """What a server answers and what it was asked."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Those of each request, with names in lower case."""
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: int = 0
    most: int = 0
    url: str = ""

    def server(self, **changes: Any) -> Server:
        defaults: dict[str, Any] = {"timeout_s": 5.0, "tries": 3}
        return Server(self.url, "name", **(defaults | changes))


def say(data: Any, status: int = 200, **headers: str) -> Answer:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return lambda handler: handler.reply(status, body, **headers)


def hang_up(handler: Handler) -> None:
    """Closes the connection without a word."""
    handler.close_connection = True
    handler.connection.close()


def cut(handler: Handler) -> None:
    """Promises more than it sends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    hang_up(handler)


def drip(handler: Handler) -> None:
    """Sends a byte now and then: each one in time, the whole never."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        pass


@contextmanager
def serve_script() -> Iterator[Script]:
    """A server whose answers the test sets."""
    pytest.importorskip("openai", reason="needs the extra 'api'")
    server: Any = QuietServer(("127.0.0.1", 0), Handler)
    server.script = Script(url=f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
