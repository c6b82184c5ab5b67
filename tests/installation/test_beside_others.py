"""The four distributions in one environment with packages of others that our users have, ``openai-agents`` first."""

import itertools
import json
from pathlib import Path

import pytest

from tests.installation.environments import (
    FOLDERS,
    ROOT,
    Environment,
    build_wheels,
    find_python,
    make_environment,
    say_what_is_missing,
)

pytestmark = pytest.mark.nightly

PYTHON = "3.11"
OTHERS = ("openai-agents", "openenv", "gem-llm")
FILES = """
import json
from importlib.metadata import distributions
print(json.dumps({d.metadata["Name"]: [str(f) for f in d.files or ()] for d in distributions()}))
"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with all of it. torch first, as the documentation says."""
    if find_python(PYTHON) is None:
        pytest.skip(say_what_is_missing(PYTHON))
    folder = tmp_path_factory.mktemp("crowded-")
    environment = make_environment(folder / "environment", PYTHON)
    wheels = build_wheels(environment, tuple(FOLDERS), folder)
    environment.install("--no-deps", "torch==2.13.0")
    environment.install(*wheels.values(), *OTHERS)
    return environment


def list_files(environment: Environment) -> dict[str, set[str]]:
    """The files of each distribution, as its RECORD has them."""
    found: dict[str, list[str]] = json.loads(environment.run("-c", FILES).stdout)
    return {name: {file for file in files if ".dist-info/" not in file} for name, files in found.items()}


def test_nothing_is_overwritten(crowded: Environment) -> None:
    files = list_files(crowded)
    assert {*FOLDERS, *OTHERS} <= set(files)
    shared = {
        (one, two): files[one] & files[two]
        for one, two in itertools.product(FOLDERS, files)
        if one != two and files[one] & files[two]
    }
    assert not shared
    tops = {name: {file.partition("/")[0] for file in files[name] if not file.startswith("..")} for name in FOLDERS}
    assert tops == {name: {name.replace("-", "_")} for name in FOLDERS}


def test_every_command_has_its_help(crowded: Environment) -> None:
    code = "from spear_envs.cli import SUMMARIES; print(*SUMMARIES)"
    commands = crowded.run("-c", code).stdout.split()
    assert {"train", "eval", "sandbox", "envs"} <= set(commands)
    for command in commands:
        if command != "bench":  # belongs to a checkout, which it says
            assert f"Usage: spear {command}" in crowded.call("spear", command, "--help").stdout


def test_commands_work(crowded: Environment) -> None:
    crowded.call("spear", "check", "spear/Sokoban-v1")
    played = crowded.call("spear", "eval", "spear/Sokoban-v1", "--engine", "expert", "--tasks", "4", "--json")
    assert json.loads(played.stdout)
    printed = crowded.call("spear", "train", "--print-config").stdout
    assert "spear:" in printed
    assert crowded.run("-m", "spear_training", "--print-config").stdout == printed


def test_versions_are_one(crowded: Environment) -> None:
    version = (ROOT / "VERSION").read_text("ascii").strip()
    code = "from importlib.metadata import version as v; import sys; print(*map(v, sys.argv[1:]))"
    assert crowded.run("-c", code, *FOLDERS).stdout.split() == [version] * len(FOLDERS)
    assert crowded.call("spear", "--version").stdout == f"spear {version}\n"


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
