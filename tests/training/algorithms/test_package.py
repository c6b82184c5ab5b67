"""What the package exports, and what it may import."""

from __future__ import annotations

import subprocess
import sys

import spear_training.algorithms as algorithms


def test_exports_exist_and_have_docstrings() -> None:
    for name in algorithms.__all__:
        assert getattr(algorithms, name).__doc__, f"{name} has no docstring"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, spear_training.algorithms\n"
        "heavy = {'ray', 'verl', 'vllm', 'transformers', 'tensordict', 'agents'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
