"""Requirements of a task, for people who look at an episode."""

from __future__ import annotations

from typing import NamedTuple


class Criterion(NamedTuple):
    """One requirement of a task, and whether the episode met it."""

    name: str
    """Such as ``"price"``."""
    met: bool
    wanted: str
    """What the task asks for, in words."""
    found: str
    """What the episode has, in words."""
