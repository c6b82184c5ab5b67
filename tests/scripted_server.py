"""A server of the test that answers by a script, byte by byte."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[[str, dict[str, str], bytes], bytes | None]
"""Makes an answer from a request's first line, headers and body."""


def reply(status: int, content: Any, **headers: str) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Torn(bytes):
    """An answer after which the connection is closed, whatever was promised."""


class ScriptedServer:
    """Answers the n-th request by the n-th entry of a script, the last of which repeats; None closes the connection."""

    def __init__(self, *script: Answer | bytes | None) -> None:
        self.script = list(script)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        with connection, stream:
            while line := stream.readline().decode().strip():
                headers = {}
                while header := stream.readline().decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", 0)))
                step = self.script[min(len(self.requests), len(self.script) - 1)]
                self.requests.append((line, headers, body))
                answer = step(line, headers, body) if callable(step) else step
                if answer is None:
                    return
                try:
                    connection.sendall(answer)
                except OSError:
                    return
                if isinstance(answer, Torn):
                    return


@contextmanager
def serve(*script: Answer | bytes | None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(*script)
    try:
        yield server
    finally:
        server.close()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
