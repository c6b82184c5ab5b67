"""Users' Python beside ours: what they import, and what their files may be called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spear_envs.core.machine import import_file, make_command

PROGRAM = "import random, sys, mine_beside\nprint(random.randint(3, 3) + mine_beside.FOUR, sys.argv[1:], __name__)"


def test_the_current_folder_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in ("random", "1 / 0"), ("types", "1 / 0"), ("mine", PROGRAM), ("mine_beside", "FOUR = 4"):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(make_command("mine", "a"), capture_output=True, text=True, check=False)
    assert done.stdout == "7 ['a'] __main__\n", done.stderr


def test_the_same_path_has_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this process may have the name of an installed one, such as ``tests``."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("print('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    done = subprocess.run(make_command("tests.none", path=sys.path), capture_output=True, text=True, check=False)
    assert done.stdout == "mine\n", done.stderr


def test_a_file_may_have_dataclasses_and_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text("ONE = 1")
    lines = ["from __future__ import annotations", "from dataclasses import dataclass, field"]
    lines += ["from neighbour_of_mine import ONE", "@dataclass", "class Point:", "    x: int = field(default=ONE)"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    assert import_file(tmp_path / "mine.py", "mine_of_test").Point().x == 1
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_file(tmp_path / "broken.py", "broken_of_test")
    assert "broken_of_test" not in sys.modules
