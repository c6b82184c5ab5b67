"""Frameworks of agents, as pip installs them today, beside our wheels: their agents play as programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.installation.environments import (
    ROOT,
    build_wheels,
    find_python,
    make_environment,
    say_what_is_missing,
)

pytestmark = pytest.mark.nightly

PYTHON = "3.11"
FRAMEWORKS = ("openai-agents>=0.24", "langgraph", "langchain-openai")


def test_agents_of_frameworks_play(tmp_path: Path) -> None:
    """Each wins, and its calls, written as the template writes them, are one row."""
    if find_python(PYTHON) is None:
        pytest.skip(say_what_is_missing(PYTHON))
    environment = make_environment(tmp_path / "environment", PYTHON)
    wheels = build_wheels(environment, ("spear-sandbox", "spear-envs", "spear-agents"), tmp_path)
    environment.install(*wheels.values(), *FRAMEWORKS, "fastapi", "uvicorn")
    script = ROOT / "tests" / "installation" / "frameworks_play.py"
    report = json.loads(environment.run(str(script), str(ROOT)).stdout.splitlines()[-1])
    assert len(report) == 3
    assert all(played == [True, None, ["go", "go"], [None, 0], 1] for played in report.values()), report
