"""The client against a server that answers by a script, byte by byte."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the client needs httpx (extra 'sandbox' or 'data')")

from spear_sandbox.client import HttpExecutor, Retries
from spear_sandbox.protocol import FaultKind, Limits, Outcome, SandboxFault
from spear_sandbox.service.wire import TOKEN_VARIABLE, write_reply
from spear_sandbox.web.endpoints import Backoff
from tests.commands import wait_until
from tests.sandbox.service import make_outcome, run_scripted
from tests.scripted_server import ScriptedServer, Torn, find_free_port, reply, serve

QUICK = Retries(backoff=Backoff(0.01))


def answer_echo(_: str, __: dict[str, str], body: bytes) -> bytes:
    """As the service would: the code is the output."""
    return reply(200, b"".join(write_reply(make_outcome(stdout=json.loads(body)["code"]), 0.0)))


BUSY = reply(504, {"detail": "all 2 places are taken."})


def run(*servers: ScriptedServer | str, code: str = "a", **keywords: Any) -> Outcome:
    async def play() -> Outcome:
        urls = [server if isinstance(server, str) else server.url for server in servers]
        given = {name: keywords.pop(name) for name in ("stdin", "files", "fetch_files", "limits") if name in keywords}
        executor = HttpExecutor(urls, **{"retries": QUICK, **keywords})
        try:
            return await executor.run(code, **given)
        finally:
            await executor.close()

    return asyncio.run(play())


def find_closed_port() -> str:
    return f"http://127.0.0.1:{find_free_port()}"


def test_a_run_sends_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with serve(answer_echo) as server:
        outcome = run(
            server,
            code="\ud800é",
            stdin="in",
            files={"a/b": b"\xff"},
            fetch_files=["o"],
            limits=Limits(wall_s=7, memory_mb=99),
            queue_s=12,
        )
        _, headers, body = server.requests[0]
    assert outcome == make_outcome(stdout="\ud800é") and outcome.stdout == "\ud800é"
    assert headers["content-type"] == "application/json" and "authorization" not in headers
    assert json.loads(body) == {
        "code": "\ud800é",
        "language": "python",
        "run_timeout": 7,
        "compile_timeout": 12,
        "memory_limit_MB": 99,
        "stdin": "in",
        "files": {"a/b": "/w=="},
        "fetch_files": ["o"],
    }


def test_connections_are_used_again_and_answers_do_not_mix() -> None:
    async def play(url: str) -> list[str]:
        executor = HttpExecutor(url)
        first = [(await executor.run(str(i))).stdout for i in range(5)]
        assert server.connections == 1
        many = await asyncio.gather(*(executor.run(str(i)) for i in range(5, 45)))
        await executor.close()
        return first + [outcome.stdout for outcome in many]

    with serve(answer_echo) as server:
        assert asyncio.run(play(server.url)) == [str(i) for i in range(45)]


class TestRetries:
    def test_504_is_tried_again_a_few_times(self) -> None:
        with serve(BUSY, BUSY, BUSY, answer_echo) as server:
            assert run(server).stdout == "a" and len(server.requests) == 4
        with serve(BUSY) as server:
            with pytest.raises(SandboxFault, match="all 2 places are taken") as caught:
                run(server)
            assert caught.value.kind is FaultKind.TIMEOUT and len(server.requests) == 4

    def test_a_server_is_left_alone_for_as_long_as_it_asks(self) -> None:
        away = reply(503, b"").replace(b"\r\n\r\n", b"\r\nRetry-After: 1\r\n\r\n", 1)
        with serve(away, answer_echo) as server:
            start = time.monotonic()
            assert run(server).stdout == "a" and len(server.requests) == 2
            assert time.monotonic() - start >= 1.0

    LOST = reply(200, {"status": "SandboxError", "message": "the zygote died", "run_result": None})

    TORN = Torn(b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n{")

    @pytest.mark.parametrize("failure", [None, reply(503, b""), reply(502, b"<html>"), LOST, TORN], ids=str)
    def test_a_lost_run_is_sent_once_more(self, failure: bytes | None) -> None:
        with serve(failure, answer_echo) as server:
            assert run(server).stdout == "a" and len(server.requests) == 2
        with serve(failure) as server:
            with pytest.raises(SandboxFault) as caught:
                run(server)
            assert caught.value.kind is FaultKind.UNAVAILABLE and len(server.requests) == 2
            assert "\n" not in str(caught.value)

    def test_a_server_that_does_not_answer_is_a_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spear_sandbox.client.ANSWER_SLACK_S", 0.1)
        gate = threading.Event()

        def keep_waiting(*_: object) -> None:
            gate.wait(10)

        with serve(keep_waiting) as server:
            with pytest.raises(SandboxFault, match=r"within 0\.3 s") as caught:
                run(server, queue_s=0.1, limits=Limits(wall_s=0.1))
            gate.set()
        assert caught.value.kind is FaultKind.TIMEOUT

    def test_nobody_there(self) -> None:
        with pytest.raises(SandboxFault, match="cannot be reached") as caught:
            run(find_closed_port())
        assert caught.value.kind is FaultKind.UNAVAILABLE


class TestRefusals:
    @pytest.mark.parametrize("status", [400, 413, 422])
    def test_a_refused_request_is_for_a_person_to_mend(self, status: int) -> None:
        with serve(reply(status, {"detail": "files is a list: give an object."})) as server:
            with pytest.raises(ValueError, match="give an object"):
                run(server)
            assert len(server.requests) == 1

    @pytest.mark.parametrize(
        ("status", "body"),
        [(200, b"<html>"), (200, b'{"status": "Success"}'), *((status, b"nothing here") for status in (301, 404, 500))],
    )
    def test_an_answer_of_another_program_is_a_bad_reply(self, status: int, body: bytes) -> None:
        with serve(reply(status, body)) as server:
            with pytest.raises(SandboxFault) as caught:
                run(server)
            assert caught.value.kind is FaultKind.BAD_REPLY and len(server.requests) == 1

    def test_a_closed_client_runs_nothing(self) -> None:
        async def play() -> None:
            executor = HttpExecutor("http://127.0.0.1:1")
            await executor.close()
            await executor.run("a")

        with pytest.raises(SandboxFault, match="closed"):
            asyncio.run(play())

    def test_names_that_leave_the_folder_are_not_sent(self) -> None:
        with serve(answer_echo) as server:
            for given in ({"files": {"../a": b""}}, {"fetch_files": ["/etc/passwd"]}):
                with pytest.raises(ValueError, match="leaves"):
                    run(server, **given)
            assert server.requests == []


class TestToken:
    def test_the_environments_or_the_callers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, "from-outside")
        with serve(answer_echo) as server:
            run(server)
            run(server, token="given")
            assert [headers["authorization"] for _, headers, _ in server.requests] == [
                "Bearer from-outside",
                "Bearer given",
            ]

    def test_a_wrong_one_is_said_with_its_mend(self) -> None:
        with run_scripted(token="s3cret") as (running, _):
            assert run(running.url, token="s3cret").stdout == "a"
            with pytest.raises(ValueError, match=TOKEN_VARIABLE):
                run(running.url, token="other")


class TestSeveralServers:
    def test_all_get_their_share(self) -> None:
        async def play(urls: list[str]) -> None:
            executor = HttpExecutor(urls)
            await asyncio.gather(*(executor.run("a") for _ in range(12)))
            await executor.close()

        with serve(answer_echo) as one, serve(answer_echo) as two, serve(answer_echo) as three:
            asyncio.run(play([one.url, two.url, three.url]))
            assert [len(server.requests) for server in (one, two, three)] == [4, 4, 4]

    def test_a_dead_one_costs_one_try_and_is_then_left_out(self) -> None:
        async def play(urls: list[str]) -> None:
            executor = HttpExecutor(urls, retries=QUICK)
            for _ in range(6):
                assert (await executor.run("a")).stdout == "a"
            await executor.close()

        with serve(answer_echo) as living:
            asyncio.run(play([find_closed_port(), living.url]))
            assert len(living.requests) == 6


def test_a_run_that_is_cancelled_is_killed_on_the_server() -> None:
    async def play(url: str) -> None:
        client = HttpExecutor(url)
        task = asyncio.ensure_future(client.run("long"))
        while not executor.started:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()

    with run_scripted() as (running, executor):
        executor.open = False
        asyncio.run(play(running.url))
        wait_until(lambda: executor.killed == ["long"])
