"""What the game says. The words are those of ALFWorld's grammar; only :class:`Wording` differs between releases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.state import State

NOTHING_HAPPENS = "Nothing happens."
"""Answer to everything that is not admissible."""


def join_names(names: Sequence[str]) -> str:
    """``nothing``, ``a``, ``a, and b``, ``a, b, and c``."""
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def _list_things(game: Game, things: Iterable[str]) -> str:
    """The things by name, each with the article *a*, whatever its first letter."""
    names = game.names
    return join_names([f"a {names[thing]}" for thing in things])


def describe_opening(game: Game, state: State) -> str:
    """The first observation: the room, or the receptacle at which the agent starts; and the task."""
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
    """Contents of a receptacle; told on arrival, on opening and on examining."""
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
    """``hot and clean sliced``, ``cold`` and the like; empty if none of the grammar's rules fits."""
    clean, sliced = thing in state.clean, thing in state.sliced
    heat = "hot" if thing in state.hot else "cool" if thing in state.cool else ""
    if clean:
        words = f"{heat} and clean" if heat else "clean"
        return f"{words} sliced" if sliced else words
    if sliced:
        return f"{heat} sliced" if heat else ""
    return "cold" if heat == "cool" else heat
