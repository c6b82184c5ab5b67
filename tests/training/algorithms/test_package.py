"""What the package exports, and what it may import."""

from __future__ import annotations

import spear_training.algorithms as algorithms


def test_exports_exist_and_have_docstrings() -> None:
    for name in algorithms.__all__:
        assert getattr(algorithms, name).__doc__, f"{name} has no docstring"
