from __future__ import annotations

import subprocess
import sys

import gymnasium as gym

import spear_envs

PROBE = """
import sys, time
start = time.perf_counter()
import spear_envs
print(time.perf_counter() - start)
print(*sorted(sys.modules.keys() & {"torch", "transformers", "ray", "verl", "vllm", "rich", "click", "pandas"}))
"""


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_is_quick_and_light() -> None:
    results = [run_python(PROBE).splitlines() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in results) < 0.5
    assert results[0][1] == ""


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


def test_public_names_exist() -> None:
    assert all(hasattr(spear_envs, name) for name in spear_envs.__all__)
    assert "spear/Sokoban-v1" in gym.registry
