"""What a family of problems is."""

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

    ``answer`` and ``code`` are two ways to the same number: what the code finds by trying, say, the other counts by a
    formula.
    """

    name: str
    draw: Callable[[Dice, int], Parameters]
    """Parameters of a level, from a source of chance; they need not be new."""
    text: Callable[..., str]
    """The problem, from the parameters."""
    answer: Callable[..., int]
    """Its answer."""
    code: Callable[..., str]
    """A program that prints the answer."""
    least: int = 10
    """Smallest answer that is kept: smaller ones are guessed too easily."""
    only_test: bool = False
    """Whether the training and the validation split have none of it."""
