"""``spear init env``: names, files, and the package that it writes."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spear_envs import SpearError
from spear_envs.scaffold import cli as writing
from spear_envs.scaffold.cli import FILES, EnvPackage, check_name, render_package, write_package

ROOT = Path(__file__).resolve().parents[3]
MAZE = EnvPackage("my_maze")


@pytest.mark.parametrize(
    ("name", "distribution", "title", "env_id"),
    [
        ("maze", "maze", "Maze", "maze/Maze-v0"),
        ("key_corridor", "key-corridor", "KeyCorridor", "key_corridor/KeyCorridor-v0"),
        ("maze_2d", "maze-2d", "Maze2d", "maze_2d/Maze2d-v0"),
    ],
)
def test_what_follows_from_a_name(name: str, distribution: str, title: str, env_id: str) -> None:
    package = EnvPackage(check_name(name))
    assert (package.distribution, package.title, package.env_id) == (distribution, title, env_id)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Maze", "lower-case letters"),
        ("my-maze", "lower-case letters"),
        ("KeyCorridor", "lower-case letters"),
        ("2_mazes", "lower-case letters"),
        ("_maze_", "lower-case letters"),
        ("../maze", "lower-case letters"),
        ("", "a letter first"),
        ("münze", "lower-case letters and digits"),
        ("maze\n", "lower-case letters"),
        ("class", "class_env"),
        ("json", "a word of Python"),
        ("spear", "a name of SPEAR Envs"),
        ("spear_training", "a name of SPEAR Envs"),
        ("tests", "itself uses"),
        ("build", "itself uses"),
        ("numpy", "a package that is installed"),
    ],
)
def test_names_that_will_not_do(name: str, words: str) -> None:
    with pytest.raises(SpearError) as caught:
        check_name(name)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_every_template_is_used_and_packed() -> None:
    folder = Path(writing.__file__).parent
    packed = re.search(r'^"spear_envs.scaffold" = \["([^"]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert packed is not None
    assert sorted(path.name for path in folder.glob(packed[1])) == sorted(FILES.values())
    assert sorted(path.name for path in (folder / "template").iterdir()) == sorted(FILES.values())


def test_nothing_is_left_to_fill_in() -> None:
    files = render_package(MAZE)
    assert set(files) == {
        "pyproject.toml",
        "README.md",
        ".gitignore",
        "my_maze/__init__.py",
        "my_maze/env.py",
        "tests/test_contract.py",
    }
    assert not any("${" in text or "corridor/Key" in text for text in files.values())
    assert 'register_env(ENV_ID, "my_maze.env:MyMazeEnv")' in files["my_maze/__init__.py"]


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_and_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    inode = (tmp_path / "empty").stat().st_ino
    for name in ("new", "empty"):
        write_package(MAZE, tmp_path / name)
        assert list_files(tmp_path / name) == set(render_package(MAZE))
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o777 & ~_read_umask()
    assert (tmp_path / "empty").stat().st_ino == inode, "it may be somebody's current folder"
    assert {path.name for path in tmp_path.iterdir()} == {"new", "empty"}
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {
        path.split("/")[0] for path in render_package(MAZE)
    }


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_places_that_are_taken_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").touch()
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for place, words in (
        ("full", "is not empty: clear it, or name another folder with --out"),
        ("file", "is a file: name another folder with --out"),
        ("nowhere", "is a file: name another folder with --out"),
        ("no/such", "does not exist: make it"),
    ):
        with pytest.raises(SpearError, match=words):
            write_package(MAZE, tmp_path / place)
    assert list_files(tmp_path) == {"full/.hidden", "file"}


@pytest.mark.parametrize("there", [False, True])
def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    folder = tmp_path / "maze"
    if there:
        folder.mkdir()
    write, count = Path.write_text, 0

    def fill_the_disk(self: Path, *args: Any, **kwargs: Any) -> int:
        nonlocal count
        count += 1
        if count == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        write_package(MAZE, folder)
    assert list(tmp_path.iterdir()) == ([folder] if there else []) and list_files(tmp_path) == set()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no luck"), KeyboardInterrupt()])
def test_nothing_half_moved_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    rename, moved = Path.rename, list[Path]()

    def fail_late(self: Path, target: Path) -> Path:
        moved.append(self)
        if len(moved) == 3:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_late)
    with pytest.raises(type(error)):
        write_package(MAZE, tmp_path)
    assert len(moved) == 3 and list(tmp_path.iterdir()) == []


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


def test_its_tests_pass(package: Path) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=package, path=package)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_the_python_of_its_readme_runs(package: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (package / "README.md").read_text("utf-8"), re.S)
    done = run("-c", block, folder=package, path=package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("True key_corridor/8/train/")


def test_what_somebody_breaks_is_found(package: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__")))
    env = copy / NAME / "env.py"
    text, expert = env.read_text("utf-8"), 'return [*plan, *walk(place, self._door), "open"]'
    assert text.count(expert) == 1
    env.write_text(text.replace(expert, 'return [*plan, "open"]'))
    done = spear("check", ENV_ID, "--module", NAME, "--resets", "100", folder=copy)
    assert done.returncode == 1 and "oracle" in done.stderr.partition(f"{ENV_ID} breaks the contract: ")[2]


def test_bad_input_is_one_clear_error(tmp_path: Path) -> None:
    done = spear("init", "env", "json", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
