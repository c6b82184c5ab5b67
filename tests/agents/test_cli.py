from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from spear_agents.cli import evaluate
from spear_envs.core import ActionResult, EnvFault
from spear_envs.core.errors import SpearError
from spear_envs.core.registration import register_env
from tests.agents.test_evaluation import SplitCorridor

SOKOBAN = ["spear/Sokoban-v1", "--engine", "expert", "--env", "modality=text", "--tasks", "6"]


def test_it_prints_success_by_subtask_with_baselines_and_fingerprint(tmp_path: Path) -> None:
    result = CliRunner().invoke(evaluate, [*SOKOBAN, "--baselines", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for words in ("won %", "CI95", "(random)", "(expert)", "100.0", summary["fingerprint"], *summary["subtasks"]):
        assert words in result.output
    assert set(summary["baselines"]) == {"random", "expert"}


def test_a_broken_environment_is_told_with_file_and_line(corridor_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register_env(corridor_id, SplitCorridor)
    monkeypatch.setattr(SplitCorridor, "_act", lambda self, action: 1 / 0)
    error = CliRunner().invoke(evaluate, [corridor_id, "--engine", "expert"]).exception
    assert re.search(r"ZeroDivisionError: division by zero \(.*test_cli\.py, line \d+\)", str(error))


def test_faults_are_told_by_their_kind(corridor_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(env: SplitCorridor, action: str) -> ActionResult:
        raise EnvFault("door_stuck", "the door is stuck")

    register_env(corridor_id, SplitCorridor)
    monkeypatch.setattr(SplitCorridor, "_act", fail)
    result = CliRunner().invoke(evaluate, [corridor_id, "--engine", "expert", "--tasks", "2"])
    assert "won %" in result.output
    assert str(result.exception) == "2 of 2 episodes were lost to faults (2 door_stuck)" and result.exit_code == 1


def test_a_baseline_that_there_is_not_does_not_take_the_figures_along() -> None:
    result = CliRunner().invoke(evaluate, ["spear/SearchR1-v0", "--engine", "expert", "--tasks", "2", "--baselines"])
    assert result.exit_code == 0, result.exception
    assert "100.0" in result.output and "no baseline random" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["spear/Sokobn-v0", "--engine", "random"], "Sokoban"),
        (["spear/Sokoban-v1"], "--model"),
        ([*SOKOBAN, "--split", "tset"], "'test'"),
        ([*SOKOBAN, "--tasks", "sokoban/none"], "Unknown task"),
        ([*SOKOBAN, "--tasks", "ten"], "Give a number of tasks, all, or ids"),
        ([*SOKOBAN, "--out", "/proc/nowhere"], "cannot be written"),
        ([*SOKOBAN, "--model", "gpt-4o"], "leave --model gpt-4o out"),
        (["spear/Sokoban-v1", "--engine", "random", "--model", "gpt-4o"], "leave --model gpt-4o out"),
        ([*SOKOBAN, "--price", "1,2"], "--price is for a server"),
        ([*SOKOBAN, "--key-variable", "KEY"], "--key-variable is for a server"),
        (["spear/Sokoban-v1", "--model", "gpt-4o"], "--engine openai"),
        (["spear/Sokoban-v1", "--model", "openai/gpt-4o"], "--engine openai"),
        (["FrozenLake-v1"], "is a FrozenLakeEnv, which is not a SpearEnv"),
        (["FrozenLake-v1", "--engine", "random"], "is a FrozenLakeEnv, which is not a SpearEnv"),
    ],
)
def test_errors_are_one_line_with_the_mend(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(evaluate, arguments)
    assert isinstance(result.exception, SpearError)
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)


def test_scripted_policies_need_no_torch(root: Path) -> None:
    code = (
        "import sys; from spear_agents.cli import evaluate; "
        f"evaluate({SOKOBAN!r}, standalone_mode=False); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
