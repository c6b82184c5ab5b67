"""Programs in the pool: what they get, how they end, and what comes back."""

import asyncio
import gc
import importlib.util
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spear_sandbox.blocking import BlockingExecutor
from spear_sandbox.installation import find_installation
from spear_sandbox.pool.local import IsolationRefusedError, LocalExecutor
from spear_sandbox.protocol import FaultKind, KillReason, Limits, RunStatus, SandboxFault
from tests.sandbox.service import find_processes

needs_numpy = pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
needs_sympy = pytest.mark.skipif(importlib.util.find_spec("sympy") is None, reason="sympy is not installed")


@pytest.mark.parametrize(
    ("code", "return_code", "error"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit(-1)", 255, ""),
        ("raise SystemExit(True)", 1, ""),
        ("raise SystemExit('so long')", 1, "so long\n"),
        ("import os; os.setsid()", 0, ""),
        ("exit()", 0, ""),
        ("quit(3)", 3, ""),
        ("help", 0, ""),
        ("import os; os._exit(9)", 9, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import os; os.abort()", -6, ""),
        ("import signal; signal.alarm(1); signal.pause()", -14, ""),
        ("import ctypes; ctypes.string_at(0)", -11, ""),
    ],
)
def test_ends(pool: BlockingExecutor, code: str, return_code: int, error: str) -> None:
    outcome = pool.run(code)
    assert (outcome.status, outcome.return_code, outcome.stderr) == (RunStatus.FINISHED, return_code, error)


def test_traceback_shows_the_program_only(pool: BlockingExecutor) -> None:
    outcome = pool.run("def half(x):\n    return 1 / x\n\nhalf(0)\n")
    lines = outcome.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if line.startswith("  File")] == [
        '  File "/tmp/main.py", line 4, in <module>',
        '  File "/tmp/main.py", line 2, in half',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert outcome.return_code == 1


def test_future_imports_of_the_sandbox_are_not_the_programs(pool: BlockingExecutor) -> None:
    assert pool.run("def f(x: undefined): pass").return_code == 1


def test_program_is_main_and_finds_no_frames_of_ours(pool: BlockingExecutor) -> None:
    code = """
import sys
import __main__
print(__name__, __file__, sys.argv, __main__.__dict__ is globals(), sys.stdin.read())
names = set()
frame = sys._getframe().f_back
while frame:
    names |= set(frame.f_globals) | set(frame.f_locals)
    frame = frame.f_back
print(names & {"control", "settings", "received", "origin", "report_fd"})
print([name for name in sys.modules if name.startswith("spear_sandbox")])
"""
    outcome = pool.run(code)
    assert outcome.stdout == "__main__ /tmp/main.py ['/tmp/main.py'] True \nset()\n[]\n", outcome


def test_exit_handlers_and_threads(pool: BlockingExecutor) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main")
"""
    assert pool.run(code).stdout == "main\nthread\nlast\n"


def test_broken_interpreter_still_ends(pool: BlockingExecutor) -> None:
    outcome = pool.run("import sys, builtins\nprint('out')\nsys.modules.clear()\nbuiltins.__dict__.clear()")
    assert outcome.status is RunStatus.FINISHED
    assert pool.run("import gc, sys\ngc.collect = sys.__stdout__ = None\nprint(1)").stdout == "1\n"


@pytest.mark.parametrize(
    ("code", "return_code", "stdout"),
    [
        ("import sys; print('x'); sys.stdout.close()", 0, "x\n"),
        ("import sys; sys.stdout = open('o', 'w'); print('x'); sys.stdout.close()", 0, ""),
        ("import sys; print('x'); sys.stdout.flush(); sys.stdout = None", 0, "x\n"),
        ("import sys, os; sys.stdout.close(); os.write(1, b'raw')", 0, "raw"),
        ("import sys; print('a')\nclass N: pass\nsys.stdout = N()", 120, "a\n"),
        ("import sys; sys.exit(1 << 64)", 255, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("raise KeyboardInterrupt", -2, ""),
        ("import sys\nsys.excepthook = lambda *_: sys.exit(3)\n1 / 0", 3, ""),
        ("import os\nclass A:\n    def __del__(self): print('bye', os.sep)\na = A()", 0, "bye /\n"),
        ("def g():\n    try: yield\n    finally: print('end')\nx = g(); next(x)", 0, "end\n"),
        ("out = open(1, 'w', closefd=False); out.write('hi')", 0, "hi"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()", 0, ""),
    ],
)
def test_programs_end_as_in_cpython(
    pool: BlockingExecutor, tmp_path: Path, code: str, return_code: int, stdout: str
) -> None:
    (tmp_path / "main.py").write_text(code)
    plain = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout) == (return_code, stdout)
    outcome = pool.run(code)
    assert (outcome.return_code, outcome.stdout) == (return_code, stdout), outcome.stderr


def test_what_an_open_file_holds_back_is_written(pool: BlockingExecutor) -> None:
    code = "f = open('o', 'w')\ndef g(): return f\nf.write('hello')"
    assert pool.run(code, fetch_files=["o"]).files == {"o": b"hello"}


def test_files_in_and_out(pool: BlockingExecutor) -> None:
    code = """
import os
print(open("a/b.txt").read())
open("out", "wb").write(bytes(range(256)))
os.symlink("/etc/passwd", "link"); os.mkfifo("pipe"); os.mkdir("folder"); os.symlink("a", "way")
open("big", "wb").truncate((16 << 20) + 1)
"""
    wanted = ["out", "link", "pipe", "folder", "big", "missing", "a/b.txt", "way/b.txt"]
    outcome = pool.run(code, files={"a/b.txt": b"inside"}, fetch_files=wanted)
    assert outcome.stdout == "inside\n", outcome
    assert dict(outcome.files) == {"out": bytes(range(256)), "a/b.txt": b"inside"}


def test_a_program_that_closes_its_folder_has_run(pool: BlockingExecutor) -> None:
    """A fault would be taken for the sandbox's own: trainers leave such episodes out."""
    outcome = pool.run("import os; os.chmod('/tmp', 0); print(1)", fetch_files=["*.png", "main.py"])
    assert (outcome.stdout, outcome.return_code, dict(outcome.files)) == ("1\n", 0, {})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"files": {"../x": b""}}, "leaves"),
        ({"fetch_files": ["/etc/passwd"]}, "leaves"),
        ({"fetch_files": ["a\0b"]}, "NUL"),
        ({"files": {"main.py/x": b""}}, "folder"),
        ({"files": {"a/b": b"", "./a//b/c": b""}}, "folder"),
    ],
)
def test_names_that_leave_the_folder_or_are_folders_of_others(pool: BlockingExecutor, given: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pool.run("pass", **given)


def test_names_with_empty_parts(pool: BlockingExecutor) -> None:
    code = "import os; print(sorted(os.listdir('a'))); open('c', 'w').write('c')"
    outcome = pool.run(code, files={"./a//b": b"b"}, fetch_files=["a//b", "./c"])
    assert (outcome.stdout, dict(outcome.files)) == ("['b']\n", {"a//b": b"b", "./c": b"c"})


def test_interpreters_that_programs_start_find_the_packages(pool: BlockingExecutor) -> None:
    code = (
        "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'import sys; print(sys.path)']))"
    )
    assert "/opt/sandbox/site" in pool.run(code).stdout


def test_name_of_the_machine_is_hidden(pool: BlockingExecutor) -> None:
    assert pool.run("import os; print(os.uname().nodename)").stdout == "sandbox\n"


def test_closing_the_output_is_not_the_end(pool: BlockingExecutor) -> None:
    outcome = pool.run("import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(5)")
    assert outcome.return_code == 5 and outcome.wall_s >= 0.3


def test_output_is_kept_counted_and_bounded(pool: BlockingExecutor) -> None:
    limits = Limits(kept_output=1000, max_output=100_000)
    outcome = pool.run("print('é' * 700)", limits=limits)
    assert (outcome.stdout, outcome.stdout_bytes, outcome.truncated) == ("é" * 500, 1401, True)
    outcome = pool.run("print('a' + 'é' * 700)", limits=limits)
    assert outcome.stdout == "a" + "é" * 499, "half a character is left out"
    outcome = pool.run("while True: print('x' * 1000)", limits=limits)
    assert (outcome.status, outcome.return_code, outcome.reason) == (RunStatus.FINISHED, -9, KillReason.OUTPUT)
    assert outcome.wall_s < 10, "it is killed at the limit, and not when its time is up"
    assert outcome.stderr.splitlines()[-1] == "[sandbox] killed: output limit of 100000 bytes"


def test_as_many_threads_as_processes_are_allowed(pool: BlockingExecutor) -> None:
    code = (
        "import threading\nmeet = threading.Barrier(29)\n"
        "def work():\n    held = [bytes(5000) for _ in range(100)]\n    meet.wait()\n"
        "for _ in range(28): threading.Thread(target=work).start()\nmeet.wait()\nprint('all')"
    )
    assert pool.run(code).stdout == "all\n"


def test_too_many_open_files_are_a_fault(pool: BlockingExecutor) -> None:
    assert pool.run("print(1)").stdout == "1\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(SandboxFault) as raised:
            pool.run("print(2)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.kind is FaultKind.UNAVAILABLE and "open files" in str(raised.value)
    assert pool.run("print(3)").stdout == "3\n"


def test_limits_are_cut_to_the_pools(pool: BlockingExecutor) -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)[0], r.getrlimit(r.RLIMIT_CPU)[0])"
    cpu_s = 20 * len(os.sched_getaffinity(0)) + 1  # the threads of a process use it up together
    assert pool.run(code, limits=Limits(descriptors=100_000, wall_s=1000.0)).stdout == f"256 {cpu_s}\n"
    more = Limits(kept_output=1 << 30, max_output=1 << 40)
    assert pool.run("print('x' * (2 << 20))", limits=more).truncated
    assert Limits(wall_s=1.0, files=9).cut(Limits(wall_s=2.0, files=8)) == Limits(wall_s=1.0, files=8)


@needs_numpy
def test_random_streams_differ_between_runs(pool: BlockingExecutor) -> None:
    code = "import random, numpy as np; print(random.random(), np.random.rand(), np.random.default_rng().random())"
    drawn = [pool.run(code).stdout.split() for _ in range(3)]
    assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True))


@needs_sympy
def test_sympy_is_warm_and_its_stream_differs(pool: BlockingExecutor) -> None:
    code = "import sympy; from sympy.core.random import rng; print(sympy.factorint(5040), rng.random())"
    outcomes = [pool.run(code) for _ in range(2)]
    assert all(outcome.stdout.startswith("{2: 4, 3: 2, 5: 1, 7: 1}") for outcome in outcomes), outcomes
    assert outcomes[0].stdout != outcomes[1].stdout
    assert outcomes[1].cpu_s < 0.4, "importing sympy costs more"


@needs_numpy
def test_hidden_import_still_works(pool: BlockingExecutor) -> None:
    assert pool.run("m = __import__('num' + 'py'); print(m.arange(3).sum())").stdout == "3\n"


def test_nothing_else_that_is_installed_can_be_imported(pool: BlockingExecutor) -> None:
    outcome = pool.run("import pytest")
    assert "No module named 'pytest'" in outcome.stderr


def run_async(pool: BlockingExecutor, test) -> None:  # type: ignore[no-untyped-def]
    """``pool`` shows that there are namespaces; the test gets a pool on its own loop."""

    async def play() -> None:
        executor = LocalExecutor("namespaces", max_running=2)
        await executor.start()
        try:
            await test(executor)
        finally:
            await executor.close()

    asyncio.run(play())


def test_cancelling_kills_the_run_and_drops_the_queue(pool: BlockingExecutor) -> None:
    async def test(executor: LocalExecutor) -> None:
        token = f"cancel{os.getpid() % 10000}"
        mark = f"import ctypes, os; ctypes.CDLL(None).prctl(15, b'{token}', 0, 0, 0)"
        code = f"{mark}\nos.fork() or os.setsid()\nwhile True: pass"
        running = [asyncio.ensure_future(executor.run(code)) for _ in range(2)]
        for _ in range(100):
            if len(find_processes(token)) == 4:
                break
            await asyncio.sleep(0.05)
        assert len(find_processes(token)) == 4
        queued = asyncio.ensure_future(executor.run("print('never')"))
        await asyncio.sleep(0.05)
        for task in (*running, queued):
            task.cancel()
        await asyncio.wait((*running, queued))
        assert all(task.cancelled() for task in (*running, queued))
        for _ in range(60):
            if not find_processes(token):
                break
            await asyncio.sleep(0.05)
        assert not find_processes(token)
        assert (await executor.run("print(1)")).stdout == "1\n"

    run_async(pool, test)


def test_closing_ends_runs_with_a_fault_and_leaves_no_process(pool: BlockingExecutor) -> None:
    async def test(executor: LocalExecutor) -> None:
        run = asyncio.ensure_future(executor.run("while True: pass"))
        queued = [asyncio.ensure_future(executor.run("while True: pass")) for _ in range(3)]
        await asyncio.sleep(0.3)
        await executor.close()
        for task in (run, *queued):
            with pytest.raises(SandboxFault) as caught:
                await task
            assert caught.value.kind is FaultKind.UNAVAILABLE
        with pytest.raises(SandboxFault, match="closed"):
            await executor.run("pass")

    before = count_children()
    run_async(pool, test)
    gc.collect()
    assert count_children() <= before


def count_children() -> int:
    """Processes below this one."""
    listed = subprocess.run(["ps", "-o", "ppid=", "-A"], capture_output=True, text=True, check=False).stdout.split()
    return listed.count(str(os.getpid()))


def test_a_start_that_is_refused_is_told_to_all_callers_and_remembered() -> None:
    async def play() -> None:
        executor = LocalExecutor("namespaces", installation=replace(find_installation(), interpreter="/nowhere/python"))
        results = await asyncio.gather(executor.run("pass"), executor.run("pass"), return_exceptions=True)
        assert all(isinstance(result, IsolationRefusedError) for result in results), results
        with pytest.raises(IsolationRefusedError) as again:
            await executor.run("pass")
        assert again.value is results[0], "the start is not tried for every run"
        await executor.close()

    asyncio.run(play())


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_closing_during_the_start(pool: BlockingExecutor, seconds: float) -> None:
    async def play() -> None:
        executor = LocalExecutor("namespaces")
        run = asyncio.ensure_future(executor.run("import time; time.sleep(10)"))
        await asyncio.sleep(seconds)
        await executor.close()
        with pytest.raises(SandboxFault, match="closed"):
            await run

    before = count_children()
    asyncio.run(play())
    assert count_children() <= before


def test_syntax_error(pool: BlockingExecutor) -> None:
    outcome = pool.run("x = 1\ndef f(:\n    pass")
    assert outcome.stderr.startswith('  File "/tmp/main.py", line 2')
    assert "SyntaxError" in outcome.stderr and "sandbox" not in outcome.stderr


def test_standard_input(pool: BlockingExecutor) -> None:
    assert pool.run("print(input(), input())", stdin="a\nbü\n").stdout == "a bü\n"
    assert "EOFError" in pool.run("input()").stderr
    assert pool.run("import sys; print(ascii(sys.stdin.read()))", stdin="a\r\nb\rc").stdout == r"'a\r\nb\rc'" + "\n"
    assert pool.run("import sys; sys.stdin.close(); print(open(0).read())", stdin="abc").stdout == "abc\n"
    assert pool.run("import sys; print(len(sys.stdin.read()))", stdin="x" * 3_000_000).stdout == "3000000\n"
    assert (
        pool.run("import os\ntry: os.write(0, b'x')\nexcept OSError: print('sealed')", stdin="a").stdout == "sealed\n"
    )


@pytest.mark.parametrize("bad", [{"isolation": "none at all"}, {"uid": 0}])
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        LocalExecutor(**bad)
