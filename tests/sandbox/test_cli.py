"""``spear sandbox``: start, signals, ports, tokens, refusal, death of the server; single files; the check-up."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spear_sandbox.web.endpoints import Backoff

pytest.importorskip("fastapi", reason="the service needs the extra 'sandbox'")
pytest.importorskip("uvicorn", reason="the service needs the extra 'sandbox'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'sandbox'")
pytest.importorskip("httpx", reason="the client needs httpx (extra 'sandbox' or 'data')")

from spear_envs import cli
from spear_sandbox.client import HttpExecutor, Retries
from spear_sandbox.protocol import FaultKind, Limits, Outcome, SandboxFault
from spear_sandbox.service.wire import TOKEN_VARIABLE
from tests.commands import RunningCommand, wait_until
from tests.sandbox.service import ask, find_processes, list_below, need_isolation, run_command, run_scripted
from tests.scripted_server import find_free_port

QUICK = Retries(backoff=Backoff(0.5))


def run_once(url: str, code: str, **keywords: Any) -> Outcome:
    async def play() -> Outcome:
        executor = HttpExecutor(url, **{"retries": QUICK, **keywords})
        try:
            return await executor.run(code, limits=Limits(wall_s=20.0))
        finally:
            await executor.close()

    return asyncio.run(play())


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


class TestServe:
    def test_it_answers_until_a_signal_and_leaves_nothing(self) -> None:
        need_isolation()
        with run_command("--max-running", "3") as running:
            assert running.line.startswith("ready: isolation ")
            assert ", 3 runs at a time, at http://127.0.0.1:" in running.line
            assert run_once(running.url, "print(1)").stdout == "1\n"
            children = list_below(running.process.pid)
            running.process.send_signal(signal.SIGINT)
            assert finish(running.process) == (0, "", "")
            assert children
            wait_until(lambda: are_gone(children), 10)

    def test_runs_under_way_are_answered_after_the_signal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On an address that others reach, with the token that is then wanted."""
        need_isolation()
        with run_command("--host", "0.0.0.0", **{TOKEN_VARIABLE: "s3cret"}) as running:
            url = f"http://127.0.0.1:{running.port}"
            with pytest.raises(ValueError, match=TOKEN_VARIABLE):
                run_once(url, "print(1)", token="other")
            monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
            outcomes: list[Outcome] = []
            code = "import time; time.sleep(1); print('late')"
            thread = threading.Thread(target=lambda: outcomes.append(run_once(url, code)))
            thread.start()
            wait_until(lambda: ask(url, None, "GET", "/health")[1]["running"] == 1)
            running.process.terminate()
            thread.join(30)
            assert [outcome.stdout for outcome in outcomes] == ["late\n"]
            assert finish(running.process) == (0, "", "")

    @pytest.mark.slow
    def test_a_run_whose_server_dies_is_sent_once_more_and_then_a_fault(self) -> None:
        need_isolation()
        mark = f"lost-{os.getpid()}"
        name_it = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\n"
        with run_command() as first, run_command() as second:

            async def play() -> Outcome:
                executor = HttpExecutor([first.url, second.url], retries=QUICK)
                try:
                    return await executor.run(name_it + "time.sleep(3); print('done')", limits=Limits(wall_s=20.0))
                finally:
                    await executor.close()

            def kill_the_one_that_runs() -> RunningCommand:
                wait_until(lambda: bool(find_processes(mark)))
                servers = [server for server in (first, second) if server.process.poll() is None]
                victim = max(servers, key=lambda server: ask(server.url, None, "GET", "/health")[1]["running"])
                children = list_below(victim.process.pid)
                victim.process.kill()
                victim.process.wait()
                wait_until(lambda: are_gone(children), 10)
                return first if victim is second else second

            with ThreadPoolExecutor(1) as pool:
                future = pool.submit(asyncio.run, play())
                other = kill_the_one_that_runs()
                assert future.result(60).stdout == "done\n"
                future = pool.submit(run_once, other.url, name_it + "while True: pass")
                kill_the_one_that_runs()
                with pytest.raises(SandboxFault, match="cannot be reached") as caught:
                    future.result(60)
            assert caught.value.kind is FaultKind.UNAVAILABLE and not find_processes(mark)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command in this process: code, standard output and error."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["sandbox", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


NO_NAMESPACES = """
import os, sys
from spear_sandbox.guest import kernel
ids = os.getuid(), os.getgid()
try:  # before anything starts a thread: then there would be no way
    kernel.unshare(0x10000000)
    for name, text in (("setgroups", "deny"), ("uid_map", f"10001 {ids[0]} 1"), ("gid_map", f"10001 {ids[1]} 1")):
        kernel.write_file(f"/proc/self/{name}", text)
    kernel.write_file("/proc/sys/user/max_user_namespaces", "0")
except PermissionError:
    pass  # they are refused as it is
from spear_envs import cli
cli.main(["sandbox", *sys.argv[1:]])
"""


LOWERING = {
    prefix + name: "none"
    for prefix in ("", "SPEAR_", "SPEAR_SANDBOX_", "SPEAR_SANDBOX_SERVE_", "SANDBOX_")
    for name in ("ISOLATION", "ALLOW_WEAK_ISOLATION", "WEAK")
}
"""Variables of the environment that may look as if they lowered the level."""


def start_without_namespaces(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a user namespace that may have none below it, as a seccomp profile can deny them."""
    return subprocess.Popen(
        [sys.executable, "-c", NO_NAMESPACES, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **LOWERING},
    )


@pytest.mark.parametrize("command", ["serve", "run"])
def test_a_kernel_that_grants_no_namespaces_is_refused_before_the_port_is_bound(command: str) -> None:
    port = find_free_port()
    process = start_without_namespaces(*((command, "--port", str(port)) if command == "serve" else (command, __file__)))
    answered = []
    while process.poll() is None:
        with socket.socket() as line:
            answered.append(line.connect_ex(("127.0.0.1", port)) == 0)
        time.sleep(0.05)
    code, out, err = finish(process)
    assert (code, out) == (78, "") and answered and not any(answered)
    assert err.startswith("Error: ") and err.count("\n") == 1
    for word in (
        "namespaces: probe 'start' failed",
        "bwrap: probe",
        "user.max_user_namespaces",
        "--allow-weak-isolation",
    ):
        assert word in err


def test_a_weak_level_is_taken_only_by_its_flag_and_said_aloud(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print(6 * 7)")
    code, out, err = finish(start_without_namespaces("run", str(program), "--allow-weak-isolation", "none", "--json"))
    assert code == 0 and json.loads(out)["level"] == "none" and json.loads(out)["stdout"] == "42\n"
    assert "Warning: no strong isolation holds here" in err and "'none' only" in err


class TestFailedStarts:
    def test_a_taken_port_is_one_clear_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        need_isolation()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            code, out, err = call(capsys, "serve", "--zygotes", "1", "--port", str(taken.getsockname()[1]))
        assert (code, out) == (1, "") and err.startswith("Error: ") and "choose another --port" in err

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--port", "70000"), ("--isolation", "none"), ("--isolation", "magic"),
            ("--allow-weak-isolation", "bwrap"), ("--max-running", "0"), ("--queue-wait", "-1"),
            ("--max-run-timeout", "0"), ("--memory-mb", "1"), ("--packages", "no_such_thing"),
            ("--packages", "sys"),
        ],
    )  # fmt: skip
    def test_bad_arguments_are_usage_errors(
        self, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = call(capsys, "serve", *arguments)
        assert code == 2 and arguments[0] in err


class TestRun:
    def test_output_and_exit_code_are_the_programs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        need_isolation()
        program = tmp_path / "program.py"
        program.write_text("import sys\nprint(input() * 2)\nprint('ü', file=sys.stderr)\nsys.exit(5)\n")
        given = tmp_path / "given.txt"
        given.write_text("ab\n")
        assert call(capsys, "run", str(program), "--stdin", str(given)) == (5, "abab\n", "ü\n")

    def test_input_that_would_be_changed_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        program, given = tmp_path / "program.py", tmp_path / "given"
        program.write_text("print(input())")
        given.write_bytes(b"\xe9\n")
        for arguments in ((str(program), "--stdin", str(given)), (str(given),)):
            code, out, err = call(capsys, "run", *arguments)
            assert (code, out) == (2, "") and "UTF-8" in err

    @pytest.mark.parametrize(
        ("outcome", "code", "sentence"),
        [
            ({"return_code": 5, "stderr": "w\n"}, 5, "w\n"),
            ({"return_code": -11}, 128 + 11, ""),
            ({"status": "TimeLimitExceeded", "return_code": None, "reason": "timeout"}, 124, "killed after 0.5 s"),
            ({"truncated": True}, 0, "the output is cut"),
        ],
    )
    def test_how_ends_are_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: dict[str, Any], code: int, sentence: str
    ) -> None:
        program = tmp_path / "program.py"
        program.write_text(json.dumps({**outcome, "stdout": "out\n"}))
        with run_scripted() as (running, _):
            found, out, err = call(capsys, "run", str(program), "--url", running.url, "--timeout", "0.5")
            assert (found, out) == (code, "out\n") and sentence in err
            found, out, err = call(capsys, "run", str(program), "--url", running.url, "--json")
            assert (found, err) == (code, "") and outcome.items() <= json.loads(out).items()

    def test_on_a_service(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        program = tmp_path / "program.py"
        program.write_text("hello")
        with run_scripted() as (running, _):
            assert call(capsys, "run", str(program), "--url", running.url) == (0, "hello", "")
        code, _, err = call(capsys, "run", str(program), "--url", running.url)
        assert code == 70 and err.startswith("Error: ") and err.count("\n") == 1
        code, _, err = call(capsys, "run", str(program), "--url", "nonsense")
        assert code == 1 and "write, for instance" in err
        assert call(capsys, "run", str(tmp_path / "missing.py"))[0] == 2
