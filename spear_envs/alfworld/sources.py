"""Sources of games: a file of the official format, or the synthesizer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GameText:
    """Everything that defines one game."""

    problem: str
    """The PDDL problem: objects, initial facts, goal."""
    sentence: str
    """The task, such as ``put a hot apple in fridge.``; follows ``Your task is to: ``."""
    grammar: str | None
    """TextWorld's grammar, with the wording; None for that of release 2.1.2."""
    domain: str | None
    """The PDDL domain, with the effects of commands; None for that of release 2.1.2."""
    task_type: str
    """ALFRED's name of the task type; empty if it is not known."""


class GameSource(Protocol):
    """A game that is read when it is played."""

    def __hash__(self) -> int: ...

    @property
    def key(self) -> Hashable:
        """Cache key of the parsed game. Cheap; changes if the file changes.

        Raises:
            SpearError: the file is gone.
        """

    @property
    def path(self) -> Path | None:
        """The ``game.tw-pddl``, or None if there is no file."""

    def read(self) -> GameText:
        """The game.

        Raises:
            SpearError: the file is gone or is not a game; the message names file and fault.
        """
