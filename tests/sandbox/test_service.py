"""The service over the real sandbox: SandboxFusion's contract with what programs really do."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'sandbox'")
pytest.importorskip("uvicorn", reason="the service needs the extra 'sandbox'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'sandbox'")

from spear_sandbox.protocol import Limits
from tests.commands import wait_until
from tests.sandbox.service import RunningService, ask, find_processes, run_local


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    """Four places, runs of at most 20 s."""
    with run_local(limits=Limits(wall_s=20.0, memory_mb=256), max_running=4, max_run_s=20.0) as running:
        yield running


def run(running: RunningService, code: str, **fields: Any) -> dict[str, Any]:
    status, reply, headers = ask(running.url, {"code": code, **fields})
    assert status == 200 and headers["x-sandbox-isolation"] == reply["sandbox"]["level"]
    assert isinstance(reply, dict)
    return reply


def test_a_program_that_ends_well(running: RunningService) -> None:
    reply = run(running, "import sys\nprint(6 * 7)\nprint('w', file=sys.stderr)", language="python")
    result, block = reply.pop("run_result"), reply.pop("sandbox")
    assert reply == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {},
    }
    assert 0 < result.pop("execution_time") < 20
    assert result == {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": "w\n"}
    assert block["level"] in ("namespaces", "bwrap") and block["reason"] == ""
    assert (block["stdout_bytes"], block["stderr_bytes"], block["truncated"]) == (3, 2, False)
    assert block["cpu_s"] > 0 and block["peak_rss_kb"] > 1000 and block["queue_s"] >= 0


def test_the_time_limit_keeps_what_was_printed(running: RunningService) -> None:
    start = time.monotonic()
    reply = run(running, "print('before', flush=True)\nwhile True: pass", run_timeout=0.7)
    assert time.monotonic() - start < 10
    result = reply["run_result"]
    assert (reply["status"], reply["sandbox"]["reason"]) == ("Failed", "timeout")
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert result["stdout"] == "before\n" and 0.6 < result["execution_time"] < 5


def test_odd_source_is_the_programs_own_mistake(running: RunningService) -> None:
    for code in ("\0", "print(1)\0print(2)", "print('\ud800')", "# \udfff", "\ufeffprint(1)", "", "é = 1", "("):
        reply = run(running, code)
        assert reply["status"] in ("Success", "Failed") and reply["run_result"]["status"] == "Finished", code
    assert run(running, "print(1)")["run_result"]["stdout"] == "1\n"


def test_a_loaded_server_slows_trivial_programs_down_and_fails_none(running: RunningService) -> None:
    with ThreadPoolExecutor(64) as pool:
        busy = [pool.submit(run, running, "import time; time.sleep(2.4)", run_timeout=20) for _ in range(4)]
        replies = list(pool.map(lambda i: run(running, f"print({i})", run_timeout=2, compile_timeout=60), range(24)))
        assert [reply["run_result"]["stdout"] for reply in replies] == [f"{i}\n" for i in range(24)]
        assert all(future.result()["status"] == "Success" for future in busy)
    assert max(reply["sandbox"]["queue_s"] for reply in replies) > 2


def test_a_sender_that_goes_away_has_its_run_killed(running: RunningService) -> None:
    mark = f"gone-{os.getpid()}"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\nwhile True: pass"
    parts = urlsplit(running.url)
    content = json.dumps({"code": code, "run_timeout": 15}).encode()
    with socket.create_connection((str(parts.hostname), parts.port or 0)) as caller:
        head = b"POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(content)
        caller.sendall(head + content)
        wait_until(lambda: bool(find_processes(mark)), 10)
    wait_until(lambda: not find_processes(mark), 5)
    wait_until(lambda: running.service.counts.running == 0, 5)
    assert running.service.counts.gone >= 1 and run(running, "print(1)")["status"] == "Success"


def test_the_client_and_a_pool_in_this_process_give_the_same(running: RunningService) -> None:
    pytest.importorskip("httpx", reason="the client needs httpx")
    from spear_sandbox.client import HttpExecutor
    from spear_sandbox.pool.local import LocalExecutor

    code = "import sys; print(input()); open('f', 'w').write('x'); sys.exit(4)"

    async def play() -> None:
        limits = Limits(wall_s=5.0, memory_mb=100)
        for executor in (HttpExecutor(running.url), LocalExecutor(limits=limits, zygotes=1)):
            outcomes.append(await executor.run(code, stdin="ü", files={"a": b""}, fetch_files=["f"], limits=limits))
            await executor.close()

    outcomes: list[Any] = []
    asyncio.run(play())
    over_http, in_process = outcomes
    for name in ("status", "return_code", "stdout", "stderr", "stdout_bytes", "truncated", "level", "reason", "files"):
        assert getattr(over_http, name) == getattr(in_process, name)
    assert over_http.files == {"f": b"x"} and over_http.return_code == 4


def test_no_file_of_ours_is_left_behind(running: RunningService) -> None:
    before = set(Path("/tmp").iterdir())
    for _ in range(5):
        run(running, "open('x', 'w').write('x')")
    assert set(Path("/tmp").iterdir()) - before == set()
