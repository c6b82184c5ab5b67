"""The service over HTTP around a scripted executor: what it answers, whom it lets wait, whose run it kills."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'sandbox'")
pytest.importorskip("uvicorn", reason="the service needs the extra 'sandbox'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'sandbox'")

from spear_sandbox.protocol import Limits
from tests.commands import wait_until
from tests.sandbox.service import RunningService, ScriptedExecutor, ask, run_scripted


def send(url: str, body: Any) -> socket.socket:
    """A request whose answer nobody has read yet."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    caller = socket.create_connection((str(parts.hostname), parts.port or 0), timeout=30)
    head = f"POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    caller.sendall(head.encode() + content)
    return caller


class TestAnswers:
    def test_limits_are_the_servers_and_lower_ones_the_requests_and_files_and_input_reach_the_run(self) -> None:
        given = {"stdin": "in", "files": {"x/y": "YQ==", "z": None}, "fetch_files": ["o"]}
        lower, higher = {"memory_limit_MB": 100, "run_timeout": 3}, {"memory_limit_MB": 10**9, "run_timeout": 1e300}
        with run_scripted(limits=Limits(memory_mb=512), max_run_s=60.0) as (running, executor):
            for fields in (given, lower, higher):
                assert ask(running.url, {"code": "a", **fields})[0] == 200
            assert executor.limits == [
                Limits(memory_mb=512, wall_s=10.0),
                Limits(memory_mb=100, wall_s=3.0),
                Limits(memory_mb=512, wall_s=60.0),
            ]
            assert executor.inputs[0] == ("in", {"x/y": b"a"}, ("o",))

    @pytest.mark.parametrize(("code", "reason"), [("fault", "the zygote died"), ("bug", "RuntimeError")])
    def test_faults_of_the_sandbox_are_said_and_leave_no_place_taken(self, code: str, reason: str) -> None:
        with run_scripted(max_running=1) as (running, _):
            for _ in range(3):
                status, reply, _ = ask(running.url, {"code": code})
                assert (status, reply["status"], reply["run_result"]["status"]) == (200, "SandboxError", "Error")
                assert reason in reply["message"]
            assert ask(running.url, {"code": "well"})[1]["status"] == "Success"

    def test_an_unknown_language_is_named_in_short(self) -> None:
        with run_scripted() as (running, _):
            status, reply, _ = ask(running.url, {"code": "", "language": "\ud800" * 100_000})
            assert (status, reply["status"]) == (200, "SandboxError")
            assert "only" in reply["message"] and "python" in reply["message"] and len(reply["message"]) < 600

    def test_health_follows_the_executor(self) -> None:
        with run_scripted() as (running, executor):
            ask(running.url, {"code": '{"return_code": -9, "reason": "memory_limit"}'})
            status, health, headers = ask(running.url, None, "GET", "/health")
            assert status == 200 and headers["x-sandbox-isolation"] == "namespaces"
            features = {"userns": True, "cgroup": False}
            assert health["isolation"] == {"level": "namespaces", "weak": False, "features": features}
            assert (health["status"], health["runs"], health["killed"]) == ("ok", 1, {"memory_limit": 1})
            executor.ok = False
            status, health, _ = ask(running.url, None, "GET", "/health")
            assert (status, health["status"]) == (503, "degraded")

    def test_metrics_are_prometheus_text(self) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        with run_scripted() as (running, _):
            ask(running.url, {"code": "a"})
            ask(running.url, {"code": '{"status": "TimeLimitExceeded", "return_code": null, "reason": "timeout"}'})
            ask(running.url, {"code": "fault"})
            ask(running.url, b"{")
            page = ask(running.url, None, "GET", "/metrics")[1]
            values = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            }
        prefix = "spear_sandbox_"
        assert values[prefix + "runs_total", "success"] == values[prefix + "runs_total", "time_limit"] == 1
        assert values[prefix + "killed_total", "timeout"] == values[prefix + "faults_total",] == 1
        assert values[prefix + "answers_total", "200"] == 3 and values[prefix + "answers_total", "422"] == 1
        assert values[prefix + "run_cpu_seconds_total",] == 0.25
        assert values[prefix + "run_seconds_bucket", "+Inf"] == values[prefix + "run_seconds_count",] == 2
        assert values[prefix + "isolation", "namespaces", "false"] == 1


class TestLargeBodies:
    def test_a_sender_that_goes_away_before_the_end_is_no_error_of_the_service(self) -> None:
        with run_scripted() as (running, executor):
            parts = urlsplit(running.url)
            with socket.create_connection((str(parts.hostname), parts.port), timeout=30) as connection:
                connection.sendall(b"POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
                time.sleep(0.1)
            deadline = time.monotonic() + 20
            while 'answers_total{status="499"} 1.0' not in (page := ask(running.url, None, "GET", "/metrics")[1]):
                assert time.monotonic() < deadline, page
                time.sleep(0.05)
            assert "spear_sandbox_gone_total 1.0" in page and 'status="500"' not in page and executor.started == []

    def test_they_are_taken_where_they_are_allowed_and_refused_elsewhere(self) -> None:
        for most, status in ((64 << 20, 200), (1 << 20, 413)):
            with run_scripted(body_bytes=most) as (running, executor):
                assert ask(running.url, {"code": "#" * 17_000_000})[0] == status
                assert [len(code) for code in executor.started] == [17_000_000] * (status == 200)


class TestToken:
    def test_runs_and_metrics_want_it_and_health_does_not(self) -> None:
        with run_scripted(token="s3cret") as (running, executor):
            for given in ({}, *({"Authorization": wrong} for wrong in ("Bearer other", "s3cret", "Basic s3cret"))):
                status, answer, headers = ask(running.url, {"code": "a"}, **given)
                assert status == 401 and headers["www-authenticate"] == "Bearer" and "Authorization" in answer["detail"]
                assert ask(running.url, None, "GET", "/metrics", **given)[0] == 401
            assert executor.started == []
            assert ask(running.url, {"code": "a"}, Authorization="bearer s3cret")[0] == 200
            assert ask(running.url, None, "GET", "/metrics", Authorization="Bearer s3cret")[0] == 200
            assert ask(running.url, None, "GET", "/health")[0] == ask(running.url, None, "GET", "/v1/ping")[0] == 200


def fill(running: RunningService, executor: ScriptedExecutor, pool: ThreadPoolExecutor, number: int) -> list[Any]:
    """Occupy all places by runs that wait for the gate."""
    executor.open = False
    futures = [pool.submit(ask, running.url, {"code": f"first {i}"}) for i in range(number)]
    wait_until(lambda: len(executor.started) == number)
    return futures


def test_a_name_that_its_owner_has_pointed_here_runs_no_code() -> None:
    """A page of that name is, to a browser, one of this service."""
    foreign = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}
    with run_scripted() as (running, executor):
        executor.open = True
        status, answer, _ = ask(running.url, {"code": "a"}, **foreign)
        assert status == 403 and "--allowed-host" in answer["detail"] and executor.started == []
        assert ask(running.url, {"code": "a"}, Host="sandbox:8080")[0] == 200
    with run_scripted(hosts=frozenset({"evil.example"})) as (running, executor):
        executor.open = True
        assert ask(running.url, {"code": "a"}, **foreign)[0] == 200
    with run_scripted(token="s3cret") as (running, executor):
        executor.open = True
        assert ask(running.url, {"code": "a"}, **foreign, Authorization="Bearer s3cret")[0] == 200


class TestQueue:
    def test_runs_wait_for_places_and_none_is_lost(self) -> None:
        with run_scripted(max_running=2) as (running, executor), ThreadPoolExecutor(40) as pool:
            first = fill(running, executor, pool, 2)
            others = [pool.submit(ask, running.url, {"code": f"other {i}"}) for i in range(30)]
            wait_until(lambda: running.service.admission.queued == 30)
            health = ask(running.url, None, "GET", "/health")[1]
            assert (health["running"], health["queued"], len(executor.started)) == (2, 30, 2)
            executor.open = True
            replies = [future.result() for future in first + others]
            assert [status for status, _, _ in replies] == [200] * 32
            assert {reply["run_result"]["stdout"] for _, reply, _ in replies} == set(executor.started)
            assert all(reply["sandbox"]["queue_s"] > 0 for _, reply, _ in replies[2:])

    @pytest.mark.parametrize(
        ("queue_wait_s", "compile_timeout", "expected"), [(0.5, 30, 0.5), (60.0, 0, 0.7)], ids=["server", "client"]
    )
    def test_504_comes_after_the_shorter_wait_and_not_before(
        self, queue_wait_s: float, compile_timeout: float, expected: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("spear_sandbox.service.server.COMPILE_SLACK_S", 0.7)
        with (
            run_scripted(max_running=1, queue_wait_s=queue_wait_s) as (running, executor),
            ThreadPoolExecutor(2) as pool,
        ):
            first = fill(running, executor, pool, 1)
            start = time.monotonic()
            status, answer, _ = ask(running.url, {"code": "late", "compile_timeout": compile_timeout})
            waited = time.monotonic() - start
            assert status == 504 and "places are taken" in answer["detail"] and "late" not in executor.started
            assert expected - 0.05 <= waited < expected + 5
            executor.open = True
            assert first[0].result()[0] == 200
            assert ask(running.url, None, "GET", "/health")[1]["gateway_timeouts"] == 1

    def test_a_sender_that_goes_away_takes_its_run_and_its_turn_with_it(self) -> None:
        with run_scripted(max_running=1) as (running, executor):
            executor.open = False
            caller = send(running.url, {"code": "mine"})
            wait_until(lambda: executor.started == ["mine"])
            queued = send(running.url, {"code": "queued"})
            wait_until(lambda: running.service.admission.queued == 1)
            queued.close()
            wait_until(lambda: running.service.admission.queued == 0)
            caller.close()
            wait_until(lambda: executor.killed == ["mine"])
            wait_until(lambda: running.service.admission.taken == 0 and running.service.counts.running == 0)
            executor.open = True
            assert ask(running.url, {"code": "next"})[0] == 200
            assert executor.started == ["mine", "next"] and running.service.counts.gone == 2


def test_a_sender_that_stops_in_the_middle_of_its_body_holds_no_place() -> None:
    with run_scripted(max_running=1) as (running, executor):
        parts = urlsplit(running.url)
        with socket.create_connection((str(parts.hostname), parts.port or 0)) as caller:
            caller.sendall(b'POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"code": "a')
            assert ask(running.url, {"code": "b"})[0] == 200
        assert ask(running.url, {"code": "c"})[0] == 200 and executor.started == ["b", "c"]
