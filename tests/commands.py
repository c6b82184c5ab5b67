"""The project's services as a user starts them: the real command in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from spear_envs import cli

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0


@dataclass
class RunningCommand:
    """``spear … serve`` that has said it is ready."""

    process: subprocess.Popen[str]
    url: str
    line: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def run_command(group: str, *args: str, verb: str = "serve", **variables: str) -> Iterator[RunningCommand]:
    """``spear GROUP serve``, another verb of it, or a command that itself serves, on a free port by default."""
    port = () if "--port" in args else ("--port", "0")
    command = (group,) if group in {"gateway", "serve"} else (group, verb)
    process = subprocess.Popen(
        [sys.executable, "-m", "spear_envs.cli", *command, *port, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline().strip()
        assert line.startswith("ready: "), line + process.stderr.read()
        url = urlsplit(line.rpartition(" at ")[2])
        yield RunningCommand(process, f"{url.scheme}://{url.netloc}", line)
    finally:
        process.kill()
        process.communicate()


def run_main(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """``spear ARGS`` in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        cli.main([*map(str, args)])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def call(command: Any, *arguments: Any, code: int = 0) -> str:
    """Output of a command in this process, which is to end with this exit code."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
