"""The fourteen things that can be done, and which of them can be done now."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spear_envs.alfworld.game import Game
    from spear_envs.alfworld.state import State

__all__ = ["TREATMENTS", "Action", "CommandTable", "Treatment", "Verb"]


class Verb(str, Enum):
    """What a command does; the value is what it begins with in the wording of release 2.1.2."""

    CLEAN = "clean"
    """Clean the held object with a sink."""
    CLOSE = "close"
    """Close a receptacle."""
    COOL = "cool"
    """Cool the held object with a fridge."""
    EXAMINE = "examine"
    """Read what is in a receptacle here."""
    INSPECT = "examine (object)"
    """Read how the held object is; written ``examine`` as well."""
    GO = "go to"
    """Walk to a receptacle that is somewhere else."""
    HEAT = "heat"
    """Heat the held object with a microwave."""
    HELP = "help"
    """Read the list of commands."""
    INVENTORY = "inventory"
    """Read what is held."""
    LOOK = "look"
    """Read what is here."""
    MOVE = "move"
    """Put the held object into or onto a receptacle."""
    OPEN = "open"
    """Open a receptacle."""
    SLICE = "slice"
    """Slice an object here with the held knife."""
    TAKE = "take"
    """Take an object out of a receptacle."""
    USE = "use"
    """Switch a lamp on."""


class Action(NamedTuple):
    """A command that was understood; ids, not names."""

    verb: Verb
    thing: str = ""
    """The object it is about."""
    receptacle: str = ""
    """The receptacle it is about; for ``slice`` the knife."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """One of the three ways to change an object with a receptacle."""

    verb: Verb
    able: str
    """Predicate of the objects that can be treated."""
    gained: str
    """Attribute of :class:`State` that gains the object."""
    lost: str | None
    """Attribute of :class:`State` that loses it."""


TREATMENTS = (
    Treatment(Verb.CLEAN, "cleanable", "clean", None),
    Treatment(Verb.COOL, "coolable", "cool", "hot"),
    Treatment(Verb.HEAT, "heatable", "hot", "cool"),
)


class CommandTable:
    """The admissible commands of one game. Shared by all who play it; what it remembers hangs on the game alone."""

    def __init__(self, game: Game) -> None:
        self._game = game
        names = game.names
        self._moves = {f"go to {names[one]}": Action(Verb.GO, receptacle=one) for one in game.receptacles}
        self._moves_from: dict[str, tuple[str, ...]] = {}
        self._always = {"inventory": Action(Verb.INVENTORY), "look": Action(Verb.LOOK)}
        if game.wording.help is not None:
            self._always["help"] = Action(Verb.HELP)

    def find_move(self, state: State, command: str) -> Action | None:
        """The action of an admissible ``go to``."""
        action = self._moves.get(command)
        if action is None or self._game.location_of[action.receptacle] == state.location:
            return None
        return action

    def list_commands(self, state: State) -> tuple[dict[str, Action], tuple[str, ...]]:
        """The admissible commands of a state.

        Returns:
            All but the ``go to`` ones with their actions, and the texts of all, sorted as strings.
        """
        local = self._list_local(state)
        texts = sorted(local)
        at = bisect(texts, "go to")
        return local, (*texts[:at], *self._list_moves(state.location), *texts[at:])

    def _list_moves(self, location: str) -> tuple[str, ...]:
        moves = self._moves_from.get(location)
        if moves is None:
            where = self._game.location_of
            moves = tuple(sorted(text for text, move in self._moves.items() if where[move.receptacle] != location))
            self._moves_from[location] = moves
        return moves

    def _list_local(self, state: State) -> dict[str, Action]:
        game, held = self._game, state.held
        names, wording = game.names, game.wording
        table = self._always.copy()
        if held is not None:
            mine = names[held]
            table[f"examine {mine}"] = Action(Verb.INSPECT, held)
            if game.is_knife(held):
                for thing in state.lying.get(state.location, ()):
                    if thing in game.sliceable:
                        table[f"slice {names[thing]} with {mine}"] = Action(Verb.SLICE, thing, held)
        for receptacle in game.receptacles_at.get(state.location, ()):
            place = names[receptacle]
            table[f"examine {place}"] = Action(Verb.EXAMINE, receptacle=receptacle)
            reachable = True
            if receptacle in game.openable:
                reachable = receptacle in state.opened
                verb = Verb.CLOSE if reachable else Verb.OPEN
                table[f"{verb.value} {place}"] = Action(verb, receptacle=receptacle)
            for thing in state.contents[receptacle]:
                if thing in game.toggleable:
                    table[f"use {names[thing]}"] = Action(Verb.USE, thing)
                if reachable and held is None and thing in game.pickupable:
                    table[f"take {names[thing]} from {place}"] = Action(Verb.TAKE, thing, receptacle)
            if held is not None:
                if reachable and game.accepts(receptacle, held):
                    begin, middle = wording.put
                    table[f"{begin}{mine}{middle}{place}"] = Action(Verb.MOVE, held, receptacle)
                for treatment in TREATMENTS:
                    if game.can_treat(receptacle, treatment, held):
                        table[f"{treatment.verb.value} {mine} with {place}"] = Action(treatment.verb, held, receptacle)
        return table
