from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spear_agents.replay.runs import Run
from spear_agents.replay.server import CONNECTIONS, PageServer
from spear_envs.core.errors import SpearError
from tests.agents.replay.conftest import serve


@pytest.fixture(scope="module")
def server(sokoban_run: Path) -> Iterator[PageServer]:
    with serve(Run(sokoban_run)) as running:
        yield running


def ask(
    server: PageServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"X-Spear-Token": server.token} | fields)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_page_its_list_and_its_episodes_are_served(server: PageServer) -> None:
    status, headers, page = ask(server, "/")
    assert status == 200 and server.token.encode() in page
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    status, _, run = ask(server, "/api/run")
    assert status == 200 and len(json.loads(run)["episodes"]) == 5
    status, _, body = ask(server, "/api/episode/0")
    assert status == 200 and json.loads(body)["turns"]


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/page/page.js",
        "/episodes.jsonl",
        "/api/episode/../run",
        "/api/episode/..%2frun",
        "/api/episode/-1",
        "/api/episode/99",
        "/api/episode/0x1",
        "/api/episode/\u0661".encode().decode("latin-1"),
        "/api/episode/" + "9" * 400,
        "/api/play/look",
        "/favicon.ico",
    ],
)
def test_no_other_path_leads_anywhere(server: PageServer, path: str) -> None:
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nX-Spear-Token: {server.token}\r\n"
    with connection:
        connection.sendall(f"{request}Connection: close\r\n\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")) and b"root:" not in answer


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", ""])
def test_requests_under_another_name_are_refused(server: PageServer, host: str) -> None:
    for path in ("/", "/api/run"):
        status, _, body = ask(server, path, Host=host.format(port=server.server_port))
        assert status == 403 and server.token.encode() not in body


def test_data_needs_the_token_of_the_page(server: PageServer) -> None:
    for token in ("", "wrong", "é"):
        assert ask(server, "/api/run", X_Spear_Token=token)[0] == 403
        assert ask(server, "/api/play/act", "POST", b"{}", X_Spear_Token=token)[0] == 403


@pytest.mark.parametrize(
    ("method", "body", "headers", "status"),
    [
        ("POST", b"{}", {}, 404),  # there is no stage
        ("POST", b"{not json", {}, 404),
        ("POST", b"[" * 100_000, {}, 404),
        ("POST", b"{}", {"Content_Length": "-5"}, 400),
        ("POST", b"{}", {"Content_Length": "9999999999"}, 413),
        ("POST", b"{}", {"Content_Length": "9" * 5_000}, 400),
        ("PUT", b"{}", {}, 405),
        ("DELETE", None, {}, 405),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    server: PageServer, method: str, body: bytes | None, headers: dict[str, Any], status: int
) -> None:
    assert ask(server, "/api/play/act", method, body, **headers)[0] == status
    assert ask(server, "/api/run")[0] == 200


def test_many_slow_connections_keep_nobody_out(server: PageServer) -> None:
    before = threading.active_count()
    dripping = [
        socket.create_connection(("127.0.0.1", server.server_port), timeout=20) for _ in range(CONNECTIONS + 20)
    ]
    try:
        for connection in dripping:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert threading.active_count() - before < 8
        assert b"503" in dripping[-1].recv(100)
    finally:
        for connection in dripping:
            connection.close()
    time.sleep(0.2)
    assert ask(server, "/api/run")[0] == 200


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_one_error(server: PageServer, sokoban_run: Path) -> None:
    for port in (server.server_port, 70_000):
        with pytest.raises(SpearError, match="port"):
            PageServer(Run(sokoban_run), port=port)
