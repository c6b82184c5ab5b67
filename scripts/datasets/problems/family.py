"""Families of problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from spear_envs.core.dice import Dice

LEVELS = (1, 2, 3)
"""From easy to hard."""

Parameters: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class Family:
    """Problems that differ in their numbers.

    ``answer`` and ``code`` compute the same number in different ways, say by a formula and by enumeration.
    """

    name: str
    draw: Callable[[Dice, int], Parameters]
    """Draws parameters of a level, which may repeat."""
    text: Callable[..., str]
    """The problem, from the parameters."""
    answer: Callable[..., int]
    """Its answer."""
    code: Callable[..., str]
    """A program that prints the answer."""
    least: int = 10
    """Smallest answer that is kept: smaller ones are too easy to guess."""
    only_test: bool = False
    """Whether it only occurs in the test split."""
