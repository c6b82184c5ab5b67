"""Plays a game as TextWorld does: commands in, texts out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spear_envs.alfworld.actions import TREATMENTS, Action, Verb
from spear_envs.alfworld.feedback import (
    NOTHING_HAPPENS,
    describe_held,
    describe_object,
    describe_opening,
    describe_place,
    describe_receptacle,
)
from spear_envs.alfworld.game import Game
from spear_envs.alfworld.state import State

CHANGES: Mapping[Verb, frozenset[str]] = {
    Verb.CLEAN: frozenset({"isclean"}),
    Verb.CLOSE: frozenset({"opened"}),
    Verb.COOL: frozenset({"iscool", "ishot"}),
    Verb.EXAMINE: frozenset({"checked"}),
    Verb.INSPECT: frozenset({"checked"}),
    Verb.GO: frozenset({"atlocation"}),
    Verb.HEAT: frozenset({"iscool", "ishot"}),
    Verb.HELP: frozenset({"checked"}),
    Verb.INVENTORY: frozenset({"checked"}),
    Verb.LOOK: frozenset({"checked"}),
    Verb.MOVE: frozenset({"inreceptacle", "objectatlocation", "holds", "holdsany"}),
    Verb.OPEN: frozenset({"opened", "checked"}),
    Verb.SLICE: frozenset({"issliced"}),
    Verb.TAKE: frozenset({"inreceptacle", "objectatlocation", "holds", "holdsany"}),
    Verb.USE: frozenset({"istoggled", "ison"}),
}
"""Predicates that a command may change."""

_RELISTED = frozenset({Verb.CLOSE, Verb.GO, Verb.MOVE, Verb.OPEN, Verb.TAKE})
"""Commands after which others are admissible."""

_TREATMENTS = {treatment.verb: treatment for treatment in TREATMENTS}


class Interpreter:
    """One play of one game, equal to TextWorld at every step: observation, admissible commands, ``won``.

    Args:
        game: may be shared.
        state: where to begin; by default at the start. It is used without a copy.
    """

    __slots__ = ("_commands", "_goal", "_tracks_checked", "admissible", "game", "state", "won")

    game: Game
    state: State
    admissible: tuple[str, ...]
    """Commands that would do something now, sorted as strings, including ``help``."""
    won: bool
    """Whether the goal holds now."""

    def __init__(self, game: Game, state: State | None = None) -> None:
        self.game = game
        self._goal = game.goal
        self._tracks_checked = "checked" in game.goal.reads
        self.go_to(game.new_state() if state is None else state)

    @property
    def opening(self) -> str:
        """The first observation of the game."""
        return describe_opening(self.game, self.game.initial)

    def go_to(self, state: State) -> None:
        """Continue from ``state``, without copying it."""
        self.state = state
        self.won = self._goal.holds(state)
        self._commands, self.admissible = self.game.commands.list_commands(state)

    def find_action(self, command: str) -> Action | None:
        """Find the action of a command; None if it is not admissible.

        Only blanks at both ends are stripped: capitals and repeated blanks make a command inadmissible.
        """
        command = command.strip()
        return self._commands.get(command) or self.game.commands.find_move(self.state, command)

    def step(self, command: str) -> tuple[str, Action | None]:
        """Play a command.

        Returns:
            What the game says, and the action, or None if the command was not admissible and nothing happened.
        """
        action = self.find_action(command)
        if action is None:
            return NOTHING_HAPPENS, None
        return self.play(action), action

    def play(self, action: Action) -> str:
        """Play an admissible action; return what the game says."""
        verb = action.verb
        said = _PLAY[verb](self.game, self.state, action)
        if self._tracks_checked and "checked" in CHANGES[verb]:
            default = self.state.location if verb is Verb.LOOK else self.state.agent
            self.state.checked |= {action.receptacle or action.thing or default}
        if verb in _RELISTED:
            self._commands, self.admissible = self.game.commands.list_commands(self.state)
        if not self._goal.reads.isdisjoint(CHANGES[verb]):
            self.won = self._goal.holds(self.state)
        return said


def _go(game: Game, state: State, action: Action) -> str:
    state.location = game.location_of[action.receptacle]
    where = game.names[state.location if game.wording.arrive_at_location else action.receptacle]
    return f"You arrive at {where}. {describe_receptacle(game, state, action.receptacle)}"


def _open(game: Game, state: State, action: Action) -> str:
    state.opened |= {action.receptacle}
    return f"You open the {game.names[action.receptacle]}. {describe_receptacle(game, state, action.receptacle)}"


def _close(game: Game, state: State, action: Action) -> str:
    state.opened -= {action.receptacle}
    return f"You close the {game.names[action.receptacle]}."


def _take(game: Game, state: State, action: Action) -> str:
    thing, receptacle = action.thing, action.receptacle
    state.contents[receptacle] = _without(state.contents[receptacle], thing)
    state.taken_out |= {(thing, receptacle)}
    state.lying[state.location] = _without(state.lying.get(state.location, ()), thing)
    state.held = thing
    return f"You pick up the {game.names[thing]} from the {game.names[receptacle]}."


def _move(game: Game, state: State, action: Action) -> str:
    thing, receptacle = action.thing, action.receptacle
    state.contents[receptacle] = _with(state.contents[receptacle], thing)
    state.taken_out -= {(thing, receptacle)}
    state.lying[state.location] = _with(state.lying.get(state.location, ()), thing)
    state.held = None
    begin, middle = game.wording.put_feedback
    return f"{begin}{game.names[thing]}{middle}{game.names[receptacle]}."


def _treat(game: Game, state: State, action: Action) -> str:
    thing, treatment = action.thing, _TREATMENTS[action.verb]
    setattr(state, treatment.gained, getattr(state, treatment.gained) | {thing})
    if treatment.lost is not None:
        setattr(state, treatment.lost, getattr(state, treatment.lost) - {thing})
    return f"You {action.verb.value} the {game.names[thing]} using the {game.names[action.receptacle]}."


def _use(game: Game, state: State, action: Action) -> str:
    state.toggled |= {action.thing}  # never taken back, so the game says "turn on" every time
    state.on ^= {action.thing}
    return f"You turn on the {game.names[action.thing]}."


def _slice(game: Game, state: State, action: Action) -> str:
    state.sliced |= {action.thing}
    return f"You sliced the {game.names[action.thing]} with the {game.names[action.receptacle]}."


_PLAY: Mapping[Verb, Callable[[Game, State, Action], str]] = {
    Verb.CLEAN: _treat,
    Verb.CLOSE: _close,
    Verb.COOL: _treat,
    Verb.EXAMINE: lambda game, state, action: describe_receptacle(game, state, action.receptacle),
    Verb.INSPECT: lambda game, state, action: describe_object(game, state, action.thing),
    Verb.GO: _go,
    Verb.HEAT: _treat,
    Verb.HELP: lambda game, state, action: game.wording.help or "",
    Verb.INVENTORY: lambda game, state, action: describe_held(game, state),
    Verb.LOOK: lambda game, state, action: describe_place(game, state),
    Verb.MOVE: _move,
    Verb.OPEN: _open,
    Verb.SLICE: _slice,
    Verb.TAKE: _take,
    Verb.USE: _use,
}


def _without(ids: tuple[str, ...], one: str) -> tuple[str, ...]:
    return tuple([other for other in ids if other != one])


def _with(ids: tuple[str, ...], one: str) -> tuple[str, ...]:
    return ids if one in ids else tuple(sorted((*ids, one)))
