"""What the tests of the code environment share."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.code.env import CodeInterpreterEnv
from spear_sandbox.protocol import Isolation, Limits, Outcome, RunStatus, SandboxFault


def make_outcome(stdout: str = "", stderr: str = "", **kwargs: Any) -> Outcome:
    """How a run ended, by default well."""
    given: dict[str, Any] = {
        "status": RunStatus.FINISHED,
        "return_code": 1 if stderr else 0,
        "stdout": stdout,
        "stderr": stderr,
        "wall_s": 0.0,
        "cpu_s": 0.0,
        "peak_rss_kb": 0,
        "queue_s": 0.0,
        "stdout_bytes": len(stdout),
        "stderr_bytes": len(stderr),
        "truncated": False,
        "level": Isolation.NONE,
    }
    return Outcome(**{**given, **kwargs})


class Subprocess:
    """Runs code of these tests in a plain process: nothing keeps it from anything."""

    def __init__(self) -> None:
        self.programs: list[str] = []
        self.limits: list[Limits | None] = []
        self.fault: Exception | None = None
        self.outcome: Outcome | None = None

    def run(self, code: str, *, limits: Limits | None = None) -> Outcome:
        self.programs.append(code)
        self.limits.append(limits)
        if self.fault is not None:
            raise self.fault
        if self.outcome is not None:
            return self.outcome
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "main.py")
            path.write_text(code, encoding="utf-8", errors="surrogatepass")
            try:
                done = subprocess.run(
                    [sys.executable, "-I", str(path)],
                    capture_output=True,
                    timeout=limits.wall_s if limits else 30,
                    check=False,
                )
            except subprocess.TimeoutExpired as late:
                printed = (late.stdout or b"").decode("utf-8", "replace")
                return make_outcome(printed, status=RunStatus.TIME_LIMIT, return_code=None)
        out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        return make_outcome(out, err, return_code=done.returncode)


def make(**kwargs: Any) -> CodeInterpreterEnv:
    """The environment by its id."""
    env = gym.make("spear_envs:spear/CodeInterpreter-v0", disable_env_checker=True, **kwargs).unwrapped
    assert isinstance(env, CodeInterpreterEnv)
    return env


def make_asking(tmp_path: Path, answer: str = "42", **kwargs: Any) -> CodeInterpreterEnv:
    """One problem, "What is it?", with this answer, reset; code runs in plain processes unless told otherwise."""
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"problem": "What is it?", "answer": answer}) + "\n")
    env = make(dataset=path, **{"sandbox": Subprocess(), **kwargs})
    env.reset(seed=0)
    return env


def call(code: Any) -> str:
    """A response that posts code."""
    return f"<tool_call>\n{json.dumps({'name': 'code_interpreter', 'arguments': {'code': code}})}\n</tool_call>"


@pytest.fixture(scope="session")
def isolated() -> Callable[..., Outcome]:
    """Runs code in the sandbox of this process; skips where the kernel refuses it."""
    from spear_sandbox.blocking import open_executor

    executor = open_executor()
    try:
        executor.run("print(1)")
    except SandboxFault as fault:
        pytest.skip(f"no sandbox here: {fault}")
    return executor.run
