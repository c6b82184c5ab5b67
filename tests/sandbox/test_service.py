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


def test_memory_and_output_limits_end_with_their_line(running: RunningService) -> None:
    flood = run(running, "while True: print('x' * 100_000)")
    result = flood["run_result"]
    assert (flood["status"], result["status"], result["return_code"]) == ("Failed", "Finished", -9)
    assert result["stderr"].splitlines()[-1] == "[sandbox] killed: output limit of 16 MiB"
    assert flood["sandbox"]["truncated"] and len(result["stdout"]) == 1 << 20
    children = """
import os, time
for _ in range(4):
    if not os.fork():
        b = b'x' * (200 << 20)
        time.sleep(9)
time.sleep(9)
"""
    eaten = run(running, children, run_timeout=15)
    assert (eaten["run_result"]["status"], eaten["run_result"]["return_code"]) == ("Finished", -9)
    last = eaten["run_result"]["stderr"].splitlines()[-1]
    assert last == "[sandbox] killed: memory limit of 256 MB for all processes together"
    assert eaten["sandbox"]["reason"] == "memory_limit"


def test_a_request_may_lower_the_memory_and_not_raise_it(running: RunningService) -> None:
    code = "print(len(b'x' * (100 << 20)))"
    assert run(running, code)["run_result"]["stdout"] == f"{100 << 20}\n"
    low = run(running, code, memory_limit_MB=40)["run_result"]
    assert low["return_code"] == 1 and "MemoryError" in low["stderr"]
    high = run(running, "print(len(b'x' * (2000 << 20)))", memory_limit_MB=100_000)["run_result"]
    assert high["return_code"] == 1 and "MemoryError" in high["stderr"]


def test_odd_output_is_kept_character_by_character(running: RunningService) -> None:
    code = "import sys; sys.stdout.buffer.write(b'a\\0b\\xff\\xfe\\xe2\\x82c\\xf0\\x9f\\x98\\x80\\r\\n' * 2)"
    expected = "a\0b\ufffd\ufffd\ufffd\ufffdc😀\r\n" * 2
    reply = run(running, code)
    assert reply["run_result"]["stdout"] == expected
    assert (reply["status"], reply["sandbox"]["stdout_bytes"]) == ("Success", 28)


def test_odd_source_is_the_programs_own_mistake(running: RunningService) -> None:
    for code in ("\0", "print(1)\0print(2)", "print('\ud800')", "# \udfff", "\ufeffprint(1)", "", "é = 1", "("):
        reply = run(running, code)
        assert reply["status"] in ("Success", "Failed") and reply["run_result"]["status"] == "Finished", code
    assert run(running, "print(1)")["run_result"]["stdout"] == "1\n"


def test_nothing_stays_for_the_next_run(running: RunningService) -> None:
    run(running, "import builtins, os; builtins.mark = 1; open('left', 'w').write('x'); os.environ['MARK'] = '1'")
    code = "import builtins, os; print(hasattr(builtins, 'mark'), os.path.exists('left'), 'MARK' in os.environ)"
    assert run(running, code)["run_result"]["stdout"] == "False False False\n"


def test_the_servers_environment_is_not_the_programs(running: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEAR_SANDBOX_SECRET", "s3cret")
    assert "s3cret" not in run(running, "import os; print(dict(os.environ))")["run_result"]["stdout"]


def test_a_loaded_server_slows_trivial_programs_down_and_fails_none(running: RunningService) -> None:
    with ThreadPoolExecutor(64) as pool:
        busy = [pool.submit(run, running, "import time; time.sleep(1.2)", run_timeout=10) for _ in range(4)]
        replies = list(pool.map(lambda i: run(running, f"print({i})", run_timeout=1, compile_timeout=60), range(24)))
        assert [reply["run_result"]["stdout"] for reply in replies] == [f"{i}\n" for i in range(24)]
        assert all(future.result()["status"] == "Success" for future in busy)
    assert max(reply["sandbox"]["queue_s"] for reply in replies) > 1


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
