from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from spear_agents.replay.cli import play, view
from spear_envs.core.errors import SpearError


@pytest.mark.parametrize("command", ["view", "play"])
def test_a_page_is_served_until_ctrl_c(command: str, sokoban_run: Path, tmp_path: Path, root: Path) -> None:
    arguments = [str(sokoban_run)] if command == "view" else ["spear/Sokoban-v1", "--browser", "--out", str(tmp_path)]
    program = [sys.executable, "-u", "-m", "spear_envs.cli", command, *arguments, "--port", "0"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+/)  \(Ctrl-C stops it\)\n", line)
        assert found, line
        with urllib.request.urlopen(found[1], timeout=20) as answer:
            assert b"<!doctype html>" in answer.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(view, [str(tmp_path / "nowhere")])
    assert isinstance(result.exception, SpearError) and "give a folder of" in str(result.exception)
    (tmp_path / "summary.json").write_text("{}")
    result = CliRunner().invoke(view, [str(tmp_path / "summary.json")])
    assert isinstance(result.exception, SpearError) and "is not a file of episodes" in str(result.exception)
    result = CliRunner().invoke(play, ["spear/Sokobn-v0", "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, SpearError) and not (tmp_path / "out").exists()
