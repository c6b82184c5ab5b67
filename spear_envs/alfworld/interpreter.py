"""Playing a game as TextWorld does: commands in, texts out. The real TextWorld is in :mod:`.textworld`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import GameSource, WordingChoice, load_game
from spear_envs.alfworld.state import TREATMENTS, Action, State, Verb

NOTHING_HAPPENS = "Nothing happens."
"""Answer to everything that is not admissible."""


def join_names(names: Sequence[str]) -> str:
    """Return ``nothing``, ``a``, ``a, and b``, ``a, b, and c``."""
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def _list_things(game: Game, things: Iterable[str]) -> str:
    """Return the things by name, each with the article *a*, whatever its first letter."""
    names = game.names
    return join_names([f"a {names[thing]}" for thing in things])


def describe_opening(game: Game, state: State) -> str:
    """Return the first observation: the room, or the receptacle at which the agent starts; and the task."""
    if state.location in game.receptacles_at:
        seen = describe_place(game, state)
    else:
        seen = _describe_middle(_list_things(game, game.receptacles))
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{seen}\n\nYour task is to: {game.task}"


def describe_place(game: Game, state: State) -> str:
    """Answer to ``look``."""
    here = game.receptacles_at.get(state.location)
    if here is None:
        return _describe_middle("nothing")  # only the opening lists the room
    beside = [
        thing
        for thing in state.lying.get(state.location, ())
        for receptacle in here
        if (thing, receptacle) in state.taken_out
    ]
    facing = join_names([game.names[receptacle] for receptacle in here])
    return f"You are facing the {facing}. Next to it, you see {_list_things(game, beside)}."


def _describe_middle(seen: str) -> str:
    return f"You are in the middle of a room. Looking quickly around you, you see {seen}."


def describe_receptacle(game: Game, state: State, receptacle: str) -> str:
    """Return the contents of a receptacle; told on arrival, on opening and on examining."""
    name = game.names[receptacle]
    if receptacle not in game.openable:
        return f"On the {name}, you see {_list_things(game, state.contents[receptacle])}."
    if receptacle not in state.opened:
        return f"The {name} is closed."
    return f"The {name} is open. In it, you see {_list_things(game, state.contents[receptacle])}."


def describe_held(game: Game, state: State) -> str:
    """Answer to ``inventory``."""
    if state.held is None:
        return "You are not carrying anything."
    return f"You are carrying: a {game.names[state.held]}."


def describe_object(game: Game, state: State, thing: str) -> str:
    """Answer to ``examine`` of the held object: the first rule of the grammar that fits."""
    name = game.names[thing]
    if thing in game.containers:
        return f"This is a normal {name}. In it, you see {_list_things(game, game.inside.get(thing, ()))}."
    words = _describe_treatment(game, state, thing)
    if words:
        return f"This is a {words} {name}."
    if thing in game.toggleable and thing in state.toggled:
        return f"This {name} is on."
    if thing in game.sliceable and thing in state.sliced:
        return f"This is a sliced {name}."
    return f"There's nothing special about {name}."


def _describe_treatment(game: Game, state: State, thing: str) -> str:
    """Return ``hot and clean sliced``, ``cold`` and the like; empty if none of the grammar's rules fits."""
    clean, sliced = thing in state.clean, thing in state.sliced
    heat = "hot" if thing in state.hot else "cool" if thing in state.cool else ""
    if clean:
        words = f"{heat} and clean" if heat else "clean"
        return f"{words} sliced" if sliced else words
    if sliced:
        return f"{heat} sliced" if heat else ""
    return "cold" if heat == "cool" else heat


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
        """Return the first observation of the game."""
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
        """Return commands that would do something now, sorted, including ``help``."""
        return self.play.admissible

    @property
    def won(self) -> bool:
        """Return whether the goal holds now."""
        return self.play.won

    def start(self, source: GameSource, wording: WordingChoice) -> str:
        """Begin a game; return the opening observation.

        Raises:
            SpearError: the game cannot be read or played.
        """
        self.play = Interpreter(load_game(source, wording))
        return self.play.opening

    def accepts(self, command: str) -> bool:
        """Return whether a stripped command is admissible now."""
        return self.play.find_action(command) is not None

    def step(self, command: str) -> tuple[str, bool, Action | None]:
        """Play a command; return what the game says, whether it was admissible, and its action on the state."""
        said, action = self.play.step(command)
        return said, action is not None, action

    def save(self) -> dict[str, Any]:
        """Return what differs from the start of the game, as plain values."""
        return {"state": self.play.state.to_plain(self.play.game.initial)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go to a saved state of the current game."""
        self.play.go_to(State.from_plain(self.play.game.initial, saved["state"]))
