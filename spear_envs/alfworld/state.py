"""The mutable part of a game, and the actions that change it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Verb(str, Enum):
    """What a command does; the value is its first words in release 2.1.2."""

    CLEAN = "clean"
    """Clean the held object with a sink."""
    CLOSE = "close"
    """Close a receptacle."""
    COOL = "cool"
    """Cool the held object with a fridge."""
    EXAMINE = "examine"
    """Read what is in a receptacle here."""
    INSPECT = "examine (object)"
    """Read the state of the held object; also written ``examine``."""
    GO = "go to"
    """Walk to another receptacle."""
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
    """A parsed command, with ids instead of names."""

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
    """Attribute of a state that gains the object."""
    lost: str | None
    """Attribute of a state that loses it."""


TREATMENTS = (
    Treatment(Verb.CLEAN, "cleanable", "clean", None),
    Treatment(Verb.COOL, "coolable", "cool", "hot"),
    Treatment(Verb.HEAT, "heatable", "hot", "cool"),
)


PROPERTIES: Mapping[str, str] = {
    "isclean": "clean",
    "ishot": "hot",
    "iscool": "cool",
    "issliced": "sliced",
    "istoggled": "toggled",
    "ison": "on",
    "opened": "opened",
    "checked": "checked",
}
"""Unary predicates that change -> attribute of :class:`State` with the ids that they hold for."""


_DECISIVE = tuple(name for name in PROPERTIES.values() if name != "checked")


class State:
    """The mutable part of a game, cheap to copy.

    Ids are those of the PDDL problem in lower case. Commands replace values and never change them in place, so copies
    are independent.
    """

    __slots__ = (
        "agent",
        "checked",
        "clean",
        "contents",
        "cool",
        "held",
        "hot",
        "location",
        "lying",
        "on",
        "opened",
        "sliced",
        "taken_out",
        "toggled",
    )

    agent: str
    """Id of the agent; never changes."""
    location: str
    """Location of the agent."""
    held: str | None
    """What the agent holds."""
    contents: dict[str, tuple[str, ...]]
    """Receptacle -> objects in it (``inreceptacle``), sorted by id. An object may be in several."""
    lying: dict[str, tuple[str, ...]]
    """Location -> objects that are there (``objectatlocation``), sorted by id; they need not be in a receptacle."""
    taken_out: frozenset[tuple[str, str]]
    """Pairs (object, receptacle) ended by a ``take`` and not put back: what ``look`` lists."""
    opened: frozenset[str]
    """Open receptacles."""
    clean: frozenset[str]
    hot: frozenset[str]
    cool: frozenset[str]
    sliced: frozenset[str]
    toggled: frozenset[str]
    """Objects that were ever used (``istoggled``), as goals require."""
    on: frozenset[str]
    """Objects that are on (``ison``); flips at each use, visible to goals only."""
    checked: frozenset[str]
    """What was looked at (``checked``); only kept for games whose goal needs it."""

    def copy(self) -> State:
        """Return an independent copy."""
        other = State.__new__(State)
        for name in State.__slots__:
            setattr(other, name, getattr(self, name))
        other.contents = self.contents.copy()
        other.lying = self.lying.copy()
        return other

    def has_property(self, predicate: str, thing: str) -> bool:
        """Return whether a unary fluent holds, such as ``ishot``."""
        if predicate == "holdsany":
            return self.held is not None and thing == self.agent
        return thing in getattr(self, PROPERTIES[predicate])

    def has_relation(self, predicate: str, first: str, second: str) -> bool:
        """Return whether a binary fluent holds, such as ``inreceptacle``."""
        if predicate == "inreceptacle":
            return first in self.contents.get(second, ())
        if predicate == "objectatlocation":
            return first in self.lying.get(second, ())
        if predicate == "holds":
            return first == self.agent and second == self.held and self.held is not None
        return first == self.agent and second == self.location  # atlocation

    def digest(self, start: State) -> str:
        """Return the key of what decides what can happen from here: 32 hex digits, the same in every process.

        ``start`` is the initial state. ``taken_out``, which only affects ``look``, and ``checked`` are left out.
        """
        parts: list[Any] = [self.location, self.held]
        parts.append([(key, ids) for key, ids in self.contents.items() if ids != start.contents[key]])
        parts.append(sorted([(key, ids) for key, ids in self.lying.items() if ids != start.lying.get(key, ())]))
        for name in _DECISIVE:
            now = getattr(self, name)
            parts.append(sorted(now) if now != getattr(start, name) else None)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def to_plain(self, start: State) -> dict[str, Any]:
        """Return differences from the initial state as JSON values; equal for equal states."""
        plain: dict[str, Any] = {"location": self.location, "held": self.held}
        for name in ("contents", "lying"):
            now, then = getattr(self, name), getattr(start, name)
            changed = {key: list(now[key]) for key in sorted(now) if now[key] != then.get(key, ())}
            if changed:
                plain[name] = changed
        for name in PROPERTIES.values():
            if getattr(self, name) != getattr(start, name):
                plain[name] = sorted(getattr(self, name))
        if self.taken_out:
            plain["taken_out"] = sorted(map(list, self.taken_out))
        return plain

    @classmethod
    def from_plain(cls, start: State, plain: Mapping[str, Any]) -> State:
        """Restore the state from :meth:`to_plain`, given the same start."""
        state = start.copy()
        state.location, state.held = plain["location"], plain["held"]
        for name in ("contents", "lying"):
            getattr(state, name).update({key: tuple(ids) for key, ids in plain.get(name, {}).items()})
        for name in PROPERTIES.values():
            if name in plain:
                setattr(state, name, frozenset(plain[name]))
        state.taken_out = frozenset((thing, place) for thing, place in plain.get("taken_out", ()))
        return state
