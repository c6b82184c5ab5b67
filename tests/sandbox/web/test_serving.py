"""What slow and greedy clients get, from a real server on a real socket."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from spear_sandbox.web.answering import BodyRoom, write_pieces
from spear_sandbox.web.listening import bind_socket
from spear_sandbox.web.serving import ConnectionLimits, make_server
from tests.commands import PATIENCE_S, wait_until

POST = b"POST /size HTTP/1.1\r\nHost: x\r\n"
LIMIT = 1 << 20
LARGE = b"x" * (8 << 20)


@contextlib.contextmanager
def serve(limits: ConnectionLimits | None = None, room: BodyRoom | None = None) -> Iterator[tuple[str, int]]:
    """A service that tells how long a body is."""
    bodies = room or BodyRoom()
    app = FastAPI()

    async def tell_size(request: Request) -> dict[str, int]:
        return {"size": len(await bodies.read(request, LIMIT, "send less"))}

    async def wait_for_body(request: Request) -> int:
        return len(await request.body())

    app.post("/size")(tell_size)
    app.post("/patient")(wait_for_body)
    app.get("/large")(lambda whole: Response(LARGE) if whole == "1" else write_pieces([LARGE], "text/plain"))
    server = make_server(app, drain_s=1, limits=limits, lifespan="off", ws="none")
    listener = bind_socket("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def connect(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    client = socket.create_connection(address, timeout=PATIENCE_S)
    client.sendall(data)
    return client


def read_all(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65_536):
            found += data
    return found


def ask(address: tuple[str, int], body: bytes, **options: Any) -> httpx.Response:
    return httpx.post(f"http://{address[0]}:{address[1]}/size", content=body, timeout=PATIENCE_S, **options)


@pytest.mark.parametrize("sent", [b"", b"POST /si", POST + b"X-Long: "], ids=["nothing", "half a line", "half a head"])
def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    with serve(ConnectionLimits(head_s=0.3)) as address:
        start = time.monotonic()
        with connect(address, sent) as client:
            assert read_all(client) == b""
        assert 0.3 <= time.monotonic() - start < PATIENCE_S
        with connect(address, POST + b"Content-Length: 1\r\n\r\n1") as client:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.sendall(sent[:4])
            if sent:  # an idle connection is uvicorn's to close
                assert b"HTTP/1.1" not in read_all(client)


def test_a_slow_body_is_no_slow_head() -> None:
    sent = POST + b"Content-Length: 2\r\n\r\n1"
    with serve(ConnectionLimits(head_s=0.3)) as address, connect(address, sent) as client:
        time.sleep(1.5)
        client.sendall(b"2")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_is_given_up() -> None:
    sent = POST + b"Content-Length: 2\r\n\r\n1"
    with serve(room=BodyRoom(seconds=0.3)) as address, connect(address, sent) as client:
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408") and b"within 0.3 s: send it at once" in answer


def test_a_body_for_which_an_application_would_wait_is_given_up() -> None:
    sent = POST.replace(b"/size", b"/patient") + b"Content-Length: 2\r\n\r\n1"
    with serve(ConnectionLimits(body_s=0.3)) as address, connect(address, sent) as client:
        assert read_all(client) == b""


@pytest.mark.parametrize("whole", ["1", "0"])
def test_an_answer_that_is_not_read_is_given_up(whole: str) -> None:
    with serve(ConnectionLimits(read_s=0.5, connections=1)) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        client.sendall(f"GET /large?whole={whole} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_until(lambda: ask(address, b"1").status_code == 200)
        found = httpx.get(f"http://{address[0]}:{address[1]}/large", params={"whole": whole}, timeout=PATIENCE_S)
        assert found.content == LARGE


def test_a_client_that_reads_steadily_gets_a_long_answer() -> None:
    with serve(ConnectionLimits(read_s=1)) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        client.connect(address)
        client.sendall(b"GET /large?whole=0 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = 0
        while part := client.recv(32 << 10):
            size += len(part)
            time.sleep(len(part) / 2e6)
    assert size > len(LARGE)


@pytest.mark.parametrize("after", [b"", POST + b"Content-Length: 1\r\n\r\n1"], ids=["first", "later"])
def test_headers_have_a_limit(after: bytes) -> None:
    with serve(ConnectionLimits(head_bytes=10_000)) as address:
        with connect(address, after) as client:
            if after:
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
            sent = 0
            with contextlib.suppress(ConnectionError):
                client.sendall(POST + b"X-Long: ")
                while sent < 50_000_000:
                    client.sendall(b"a" * 5_000)
                    sent += 5_000
            answer = read_all(client)
            # Without httptools uvicorn takes h11, which has a limit of its own.
            assert sent < 50_000_000 and (not answer or b" 431 " in answer or b" 400 " in answer)
        assert ask(address, b"123").json() == {"size": 3}


def test_a_body_that_is_refused_is_read_to_its_end() -> None:
    with serve() as address, httpx.Client() as client:
        for _ in range(3):
            answer = client.post(f"http://{address[0]}:{address[1]}/size", content=b"x" * 20 * LIMIT)
            assert answer.status_code == 413 and "send less" in answer.json()["detail"]


FEW = """
import asyncio, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (330, 330))
from fastapi import FastAPI
from spear_sandbox.web.listening import bind_socket
from spear_sandbox.web.serving import make_server
app = FastAPI()
app.get("/")(lambda: 1)
listener = bind_socket("127.0.0.1", 0)
server = make_server(app, drain_s=1, lifespan="off", ws="none")
print(listener.getsockname()[1], flush=True)
asyncio.run(server.serve([listener]))
"""


def test_a_crowd_takes_no_descriptors_that_others_need_and_floods_no_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", FEW], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        crowd = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(600)]
        answers = [client.recv(1000) for client in crowd[82:]]
        assert all(b" 503 " in answer for answer in answers)
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 200
        for client in crowd:
            client.close()
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{address[1]}/").status_code == 200)
        assert (tmp_path / "log").read_text() == ""
    finally:
        process.terminate()
        process.communicate()


def test_one_connection_too_many() -> None:
    with serve(ConnectionLimits(connections=3)) as address:
        held = [connect(address) for _ in range(3)]
        with connect(address) as client:
            answer = read_all(client)
        assert b" 503 " in answer and b"retry-after: 1" in answer and b"too many connections" in answer
        held.pop().close()
        wait_until(lambda: ask(address, b"1").status_code == 200)
        for client in held:
            client.close()


def test_bodies_share_their_room() -> None:
    room = BodyRoom(total_bytes=150_000)
    with serve(room=room) as address:
        with connect(address, POST + b"Content-Length: 100001\r\n\r\n" + b"x" * 100_000) as client:
            wait_until(lambda: room._used == 100_000)
            refused = ask(address, b"x" * 60_000)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert ask(address, b"x" * 40_000).json() == {"size": 40_000}
            client.sendall(b"x")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert ask(address, b"x" * 140_000).json() == {"size": 140_000}
        with connect(address, POST + b"Content-Length: 100001\r\n\r\n" + b"x" * 100_000):
            wait_until(lambda: room._used == 100_000)
        wait_until(lambda: room._used == 0)


def test_many_requests_on_one_connection() -> None:
    with serve(ConnectionLimits(head_bytes=2_000)) as address, httpx.Client() as client:
        for size in (0, 10, 500_000, 3, *range(60)):
            answer = client.post(f"http://{address[0]}:{address[1]}/size", content=b"x" * size)
            assert answer.json() == {"size": size}
        chunks = client.post(f"http://{address[0]}:{address[1]}/size", content=(b"x" * 9_999 for _ in range(50)))
        assert chunks.json() == {"size": 499_950}


def test_the_limit_of_descriptors_is_raised() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        make_server(FastAPI(), drain_s=1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (65_536 if hard < 0 else min(65_536, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
