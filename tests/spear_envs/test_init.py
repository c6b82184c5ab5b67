from __future__ import annotations

import subprocess
import sys


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_changes_no_global_state() -> None:
    program = (
        "import os, random, logging, warnings, numpy\n"
        "def look(): return (dict(os.environ), random.getstate(), str(numpy.random.get_state()),"
        " list(logging.root.handlers), list(warnings.filters))\n"
        "import gymnasium; before = look(); import spear_envs; print(look() == before)"
    )
    assert run_python(program).strip() == "True"


def test_the_prefix_registers_without_an_import() -> None:
    program = (
        "import gymnasium; env = gymnasium.make('spear_envs:spear/Sokoban-v1');"
        "env.reset(seed=0); print(env.unwrapped.task.id.split('/')[0])"
    )
    assert run_python(program).strip() == "sokoban-v1"
