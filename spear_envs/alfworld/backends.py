"""What plays the games by default: the interpreter of this package. TextWorld is in :mod:`.textworld`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from spear_envs.alfworld.actions import Action
from spear_envs.alfworld.gamefile import WordingChoice, load_game
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.sources import GameSource
from spear_envs.alfworld.state import State


class BackendName(str, Enum):
    """What plays the game."""

    NATIVE = "native"
    """The interpreter of this package: the same texts, several hundred times faster."""
    TEXTWORLD = "textworld"
    """TextWorld itself (extra ``alfworld``)."""


class Backend:
    """Plays one game after another, by the interpreter of this package."""

    play: Interpreter
    """The game and its state, for the expert, the goal conditions and the anchor."""

    @property
    def admissible(self) -> Sequence[str]:
        """Commands that would do something now, sorted, including ``help``."""
        return self.play.admissible

    @property
    def won(self) -> bool:
        """Whether the goal holds now."""
        return self.play.won

    def start(self, source: GameSource, wording: WordingChoice) -> str:
        """Begin a game; return the opening observation.

        Raises:
            SpearError: the game cannot be read or played.
        """
        self.play = Interpreter(load_game(source, wording))
        return self.play.opening

    def accepts(self, command: str) -> bool:
        """Whether a stripped command is admissible now."""
        return self.play.find_action(command) is not None

    def step(self, command: str) -> tuple[str, bool, Action | None]:
        """Play a command; return what the game says, whether it was admissible, and its action on the state."""
        said, action = self.play.step(command)
        return said, action is not None, action

    def save(self) -> dict[str, Any]:
        """What differs from the start of the game, as plain values."""
        return {"state": self.play.state.to_plain(self.play.game.initial)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go to a saved state of the current game."""
        self.play.go_to(State.from_plain(self.play.game.initial, saved["state"]))
