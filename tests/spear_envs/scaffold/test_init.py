"""``spear init env``: the package that it writes passes its own tests and the check, until somebody breaks it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAME, ENV_ID = "key_corridor", "key_corridor/KeyCorridor-v0"


def run(*words: str, folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command of Python in a folder, as if the package in ``path`` were installed."""
    variables = {**os.environ, "COLUMNS": "100"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, (path, ROOT))))
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def spear(*words: str, folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run("-m", "spear_envs.cli", *words, folder=folder, path=path)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package as it is written."""
    folder = tmp_path_factory.mktemp("work")
    done = spear("init", "env", NAME, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in folder.iterdir()] == ["key-corridor"]
    for step in ("cd key-corridor", "pip install -e '.[dev]'", "pytest", f"spear check {ENV_ID} --module {NAME}"):
        assert f"\n  {step}\n" in done.stdout
    return folder / "key-corridor"


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    """One to be changed."""
    return Path(shutil.copytree(package, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__")))


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return spear("check", ENV_ID, "--module", NAME, "--resets", "100", folder=folder)


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=folder, path=folder)


def test_its_tests_pass(package: Path) -> None:
    done = run_tests(package)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_it_passes_the_check(package: Path) -> None:
    done = check(package)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    assert re.search(r"oracle.*wins train \d+", done.stdout)


def test_it_is_listed(package: Path) -> None:
    done = spear("envs", "--module", NAME, folder=package)
    assert done.returncode == 0 and f"{NAME}:{ENV_ID}"[:30] in done.stdout


def test_the_python_of_its_readme_runs(package: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (package / "README.md").read_text("utf-8"), re.S)
    done = run("-c", block, folder=package, path=package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("True key_corridor/8/train/")


BREAKAGES = {
    "oracle": ('return [*plan, *walk(place, self._door), "open"]', 'return [*plan, "open"]'),
    "state": ("self._place, self._has_key = state[0], bool(state[1])", "self._place = state[0]"),
    "splits": ("or choose_split(content) != split:", "or (choose_split(content) != split and start):"),
}


@pytest.mark.parametrize("found", BREAKAGES)
def test_what_somebody_breaks_is_found(copy: Path, found: str) -> None:
    env = copy / NAME / "env.py"
    text, (old, new) = env.read_text("utf-8"), BREAKAGES[found]
    assert text.count(old) == 1
    env.write_text(text.replace(old, new))
    done = check(copy)
    assert done.returncode == 1 and f"{ENV_ID} breaks the contract: " in done.stderr
    assert found in done.stderr.partition("contract: ")[2]
    if found == "oracle":
        done = run_tests(copy)
        assert done.returncode == 1 and "test_contract" in done.stdout


@pytest.mark.parametrize(("words", "code"), [(("Maze",), 1), (("json",), 1), ((), 2), (("maze", "more"), 2)])
def test_bad_input_is_one_clear_error(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    done = spear("init", "env", *words, folder=tmp_path)
    assert done.returncode == code and "Error: " in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
